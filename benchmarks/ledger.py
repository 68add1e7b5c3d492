"""Cost of the ledger in a run without faults, with recipes/arithmetic.toml.

    python -m benchmarks.ledger [--steps 400] [--repeats 5]

The same run, once with its ledger in a file, as usual, and once with the same statements to a database in memory; which
comes first alternates. The cost of the file is the median ratio of their seconds. Also reported, for the runs with a
file: the share of their seconds, and of the conductor's work, that is spent in the ledger (encoding, statements,
commits).
"""

from __future__ import annotations

import argparse
import sqlite3
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.report import Table, save
from benchmarks.runs import RECIPE
from stretto.launch.train import prepare
from stretto.loop.records.reporter import SilentReporter
from stretto.store.ledger.ledger import Ledger
from stretto.store.series.metrics import read_metrics
from stretto_report.reading.inspection import inspect_run

_METHODS = (
    *("issue", "journal", "buffer", "settle", "commit_batch", "record_update"),
    *("put", "event", "forget", "flush", "sync"),
)


class Timed(Ledger):
    """Ledger that counts the seconds in its methods; nested calls count once."""

    seconds = 0.0
    inside = 0


def _timed(name: str) -> Callable[..., Any]:
    method = getattr(Ledger, name)

    def timed(self: Timed, *arguments: Any, **words: Any) -> Any:
        start, Timed.inside = time.perf_counter(), Timed.inside + 1
        try:
            return method(self, *arguments, **words)
        finally:
            Timed.inside -= 1
            if not Timed.inside:
                Timed.seconds += time.perf_counter() - start

    return timed


for _name in _METHODS:
    setattr(Timed, _name, _timed(_name))


class InMemory(Timed):
    """Ledger that writes the same statements to a database in memory."""

    def __init__(self, *arguments: Any, **words: Any) -> None:
        super().__init__(*arguments, **words)
        file, self._connection = self._connection, sqlite3.connect(":memory:", isolation_level=None)
        file.backup(self._connection)
        file.close()


def one_run(kind: type[Timed], seed: int, steps: int) -> dict[str, float]:
    """Train; return the seconds of reinforcement learning, the seconds spent in the ledger, and those of the
    conductor's work (0 in memory)."""
    Timed.seconds = 0.0
    with tempfile.TemporaryDirectory(prefix="stretto-benchmark-") as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr("stretto.launch.assemble.run.Ledger", kind)
        settings = (f"seed={seed}", f"trainer.steps={steps}", "evaluation.prompts=32")
        code = prepare(RECIPE, settings, path := Path(folder) / "run", resume=False).train(SilentReporter())
        if code != 0:
            raise RuntimeError(f"the run ended with {code}")
        seconds = read_metrics(path / "metrics.jsonl")[0][-1].rl_seconds
        work = inspect_run(path).busy.get("conductor", 0.0) * seconds
    return {"seconds": round(seconds, 3), "ledger": round(Timed.seconds, 3), "conductor": round(work, 3)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--repeats", type=int, default=5)
    words = parser.parse_args()
    pairs: list[dict[str, dict[str, float]]] = []
    table = Table("pair", "s with a file", "s in memory", "ratio", "share of the ledger", "of the conductor's work")
    for number in range(words.repeats):
        ways: list[tuple[str, type[Timed]]] = [("file", Timed), ("memory", InMemory)]
        pair = {name: one_run(kind, 1, words.steps) for name, kind in (ways if number % 2 else reversed(ways))}
        pairs.append(pair)
        file, memory = pair["file"], pair["memory"]
        share, of_work = file["ledger"] / file["seconds"], file["ledger"] / file["conductor"]
        ratio = file["seconds"] / memory["seconds"]
        table.add(number, file["seconds"], memory["seconds"], f"{ratio:.3f}", f"{share:.1%}", f"{of_work:.0%}")
        table.show_last()
    summary = {
        "cost_of_the_file": statistics.median(pair["file"]["seconds"] / pair["memory"]["seconds"] for pair in pairs)
        - 1,
        "share_inside": statistics.median(pair["file"]["ledger"] / pair["file"]["seconds"] for pair in pairs),
        "share_of_conductor": statistics.median(pair["file"]["ledger"] / pair["file"]["conductor"] for pair in pairs),
    }
    print(summary)
    save("ledger", {"steps": words.steps, "summary": summary, "pairs": pairs})


if __name__ == "__main__":
    main()
