"""What the canary costs: its seconds in a run, beside those of a training step.

    python -m benchmarks.canary               three runs of 120 steps and fewer: a few minutes
    python -m benchmarks.canary --steps 40

Runs of the arithmetic recipe; seconds are those of the spans that the run records. The trainer computes the text once
for each version, an engine once for each version that it loads. A step is the time from one update to the next.

Both sides compute one short text, so the share falls with the tokens of a step: the recipe's steps, of 64 short
answers, are as small as any, and the last run has steps eight times as large.
"""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from benchmarks.report import Table, save
from stretto.store.folder.run_folder import RunFolder

RECIPE = Path(__file__).resolve().parents[1] / "recipes" / "arithmetic.toml"
_LARGER = ("hidden_size=256", "layers=4", "head_dim=64", "intermediate_size=768")
_MODEL_3M = tuple(f"model.build.{key}" for key in _LARGER)
RUNS: Mapping[str, tuple[str, ...]] = {
    "0.1M, 64 answers": (),
    "3.4M, 64 answers": _MODEL_3M,
    "3.4M, 512 answers": (*_MODEL_3M, "rollout.batch_size=64", "rollout.max_in_flight=96"),
}
_FEWER = {"3.4M, 512 answers": 6}  # times as many answers take that many times fewer steps


@dataclass(frozen=True)
class Cost:
    """Medians over the versions of a run, milliseconds; shares are of a step."""

    run: str
    versions: int
    step_ms: float
    trainer_ms: float
    engine_ms: float

    @property
    def trainer_share(self) -> float:
        return self.trainer_ms / self.step_ms

    @property
    def engine_share(self) -> float:
        return self.engine_ms / self.step_ms


def measured(name: str, steps: int) -> Cost:
    """A run of the recipe with other settings."""
    steps //= _FEWER.get(name, 1)
    settings = [*RUNS[name], f"trainer.steps={steps}", "warm_start.steps=60", "evaluation.every=0"]
    with tempfile.TemporaryDirectory(prefix="stretto-canary-") as folder:
        run_dir = Path(folder) / "run"
        words = [sys.executable, "-m", "stretto.cli.main", "train", str(RECIPE), *settings]
        subprocess.run([*words, "--run-dir", str(run_dir), "--no-plots"], check=True, stdout=subprocess.DEVNULL)
        return _cost(name, RunFolder(run_dir).spans)


def _cost(name: str, spans: Path) -> Cost:
    found: dict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
    for line in spans.read_text().splitlines():
        span = json.loads(line)
        found[span["role"], span["name"]].append((span["start"], span["end"]))
    ends = sorted(end for _, end in found["trainer", "update"])
    steps = [later - earlier for earlier, later in itertools.pairwise(ends)]
    trainer, engine = (median(_milliseconds(found[role, "prove"])) for role in ("trainer", "engine-0"))
    return Cost(name, len(ends), 1000 * median(steps), trainer, engine)


def _milliseconds(spans: Sequence[tuple[float, float]]) -> list[float]:
    return [1000 * (end - start) for start, end in spans]


def main() -> None:
    """Measure, print, save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=120)
    steps: int = parser.parse_args().steps
    table = Table("run", "step ms", "trainer ms", "of a step", "engine ms", "of a step ")
    costs = [measured(name, steps) for name in RUNS]
    for cost in costs:
        shares = f"{cost.trainer_share:.1%}", f"{cost.engine_share:.1%}"
        times = f"{cost.step_ms:.1f}", f"{cost.trainer_ms:.2f}", f"{cost.engine_ms:.2f}"
        table.add(cost.run, times[0], times[1], shares[0], times[2], shares[1])
    table.show()
    rows = [asdict(one) | {"trainer_share": one.trainer_share, "engine_share": one.engine_share} for one in costs]
    print(save("canary", {"steps": steps, "costs": rows}))


if __name__ == "__main__":
    main()
