"""Ten ratios in five minutes: has a commit made something slower?

    python -m benchmarks.quick                     compared with the committed ratios of this processor
    python -m benchmarks.quick --against REVISION  compared with another commit, in alternating runs
    python -m benchmarks.quick --record            also added to benchmarks/results/quick.json

Each ratio compares stretto with something that stretto cannot change (a product of matrices, a copy, an empty
interpreter, JSON of the standard library), measured in turns in one process. Higher is better. It is a regression, with
exit code 1, if a ratio fell by more than a tenth and by more than the spread of the runs on either side. Each of the
ten has its own process. With `--against`, the benchmarks of this commit run with the packages of the other commit.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch

from benchmarks import report
from benchmarks.decisions import trajectories_per_second
from benchmarks.decode_step import KINDS, ROWS, operations, running
from benchmarks.flops import ceiling
from benchmarks.generators import prompts
from benchmarks.quick_rows import TEN, Ratios, last_points
from benchmarks.report import Table, save
from benchmarks.sandbox import plain, sandboxed
from benchmarks.serving import Load, engine_alone, serving
from benchmarks.shapes import make
from benchmarks.training_steps import utilisation
from benchmarks.weights import Policy, place
from stretto import __version__
from stretto.engine.config import EngineConfig
from stretto.engine.native.engine import NativeEngine
from stretto.model.decode.policy import CACHED_ATTENTION
from stretto.model.hf.folder import inspect_model_folder, load_policy
from stretto.model.hf.tokenizer import load_tokenizer
from stretto.store.run_folder import machine
from stretto.weights.folder import path_of
from stretto.weights.shared_memory import SharedMemoryPublisher
from stretto_verify.sandbox.config import SandboxConfig
from stretto_verify.sandbox.sandbox import Sandbox
from stretto_verify.sandbox.walls import ladder

ROOT = Path(__file__).resolve().parent.parent
ALLOWED = 0.1  # of a ratio, that it may fall by
SECONDS = 120.0  # the most for one of the ten


# ── the ten ─────────────────────────────────────────────────────────────────────────────────────────


def decode(name: str, dtype: str, steps: int) -> Ratios:
    """Share of the fastest product's rate that the products in a decode step of 64 sequences reach."""
    with tempfile.TemporaryDirectory() as folder:
        model = load_policy(make(name, Path(folder)), attention=CACHED_ATTENTION, dtype=dtype)
        engine, work, found = running(model, dtype, 5 * steps), operations(model), []
        for _ in range(5):
            peak, seconds = ceiling(KINDS[dtype], 0.5), []
            for _ in range(steps):
                start = time.perf_counter()
                engine.step()
                seconds.append(time.perf_counter() - start)
            found.append(work / statistics.median(seconds) / peak)
    return found


def train(name: str, dtype: str) -> Ratios:
    """Share of the fastest product's rate that a training step reaches."""
    with tempfile.TemporaryDirectory() as folder:
        model = make(name, Path(folder))
        return [float(utilisation(model, dtype, 3, 1)["fraction"]) for _ in range(3)]


def server() -> Ratios:
    """Tokens per second through the server with 64 streams, as a share of the engine's own."""
    with tempfile.TemporaryDirectory() as place_of:
        folder = make("3.4M", Path(place_of))
        engine = NativeEngine.load(folder, EngineConfig(slots=ROWS))
        ends, vocabulary = load_tokenizer(folder).eos_token_ids, inspect_model_folder(folder).vocab_size
        asked, found = prompts(2 * ROWS, vocabulary), []
        with serving(folder) as address:
            for turn in range(4):
                alone = engine_alone(engine, ends, asked, ROWS)
                answered, seconds = asyncio.run(Load(address, "3.4M").run(asked, ROWS))
                if turn:  # the first steps of a size cost more
                    found.append(sum(one.tokens for one in answered) / seconds / alone)
    return found


def weights(*, network: bool) -> Ratios:
    """Bytes per second of a 48M bfloat16 version until an engine can read it, as a share of a plain copy's. `network`:
    it comes from a weights server."""
    found = []
    with tempfile.TemporaryDirectory() as folder:
        build = make("48M", Path(folder))
        policy = Policy(build)
        with place(build, policy.size) as there:
            publisher, mirror = SharedMemoryPublisher(there.run, there.home), there.mirror("never")
            for version in range(1, 9):
                tensors = list(policy.step())
                start = time.perf_counter()
                publisher.publish(version, iter(tensors))
                published = time.perf_counter() - start
                start = time.perf_counter()
                shutil.copyfile(path_of(there.run, there.home, version), there.away / "copy")
                copied = time.perf_counter() - start
                (there.away / "copy").unlink()
                if network:
                    published = asyncio.run(mirror.pull(version)).seconds
                if version > 1:
                    found.append(copied / published)
    return found


def conductor() -> Ratios:
    """Trajectories decided and recorded, per JSON text that Python writes in the same CPU time."""
    trajectories_per_second("train", "ledger", 20)
    return [trajectories_per_second("train", "ledger", 60)[1] / _json_per_second() for _ in range(5)]


def _json_per_second() -> float:
    record = {"tokens": list(range(100)), "text": "1+2=3" * 20}
    start, count = time.process_time(), 0
    while time.process_time() - start < 0.5:
        json.dumps(record)
        count += 1
    return count / (time.process_time() - start)


def command(*words: str) -> Ratios:
    """CPU seconds of an empty interpreter, divided by those of a command."""

    def spent(line: list[str]) -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(line, capture_output=True, check=False)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    stretto = [sys.executable, "-m", "stretto_app.cli.main", *words]
    spent(stretto)
    return [spent([sys.executable, "-c", "pass"]) / spent(stretto) for _ in range(7)]


def sandbox() -> Ratios:
    """Seconds of a plain subprocess, divided by those of a warm sandboxed program."""
    walls = next(walls for walls in ladder(True) if walls.warm)
    found = []
    with Sandbox(walls, SandboxConfig(warm=True)) as opened:
        run = sandboxed(opened)
        for turn in range(8):
            seconds = []
            for each in (plain, run):
                start = time.perf_counter()
                for _ in range(10):
                    each()
                seconds.append(time.perf_counter() - start)
            if turn:
                found.append(seconds[0] / seconds[1])
    return found


BENCHMARKS: dict[str, Callable[[], Ratios]] = {
    "decode-3.4M-float32": lambda: decode("3.4M", "float32", 12),
    "decode-48M-float32": lambda: decode("48M", "float32", 4),
    "train-3.4M-float32": lambda: train("3.4M", "float32"),
    "server": server,
    "publish": lambda: weights(network=False),
    "network": lambda: weights(network=True),
    "conductor": conductor,
    "help": lambda: command("--help"),
    "mistake": lambda: command("train", "nosuch.toml"),
    "sandbox": sandbox,
}


# ── both sides, in turn ─────────────────────────────────────────────────────────────────────────────


def measured(name: str, packages: Path) -> Ratios | str:
    """Measure one of the ten in its own process, with the packages of a tree; a text says why it could not be
    measured."""
    paths = [ROOT, *sorted((packages / "packages").iterdir()), packages / "application"]
    surroundings = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, paths)), "OMP_NUM_THREADS": "1"}
    line = [sys.executable, "-m", "benchmarks.quick", "--one", name]
    try:
        done = subprocess.run(line, env=surroundings, cwd=ROOT, capture_output=True, text=True, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        return f"took more than {SECONDS:g} s"
    if done.returncode:
        return (done.stderr.strip().splitlines() or ["failed"])[-1][:90]
    ratios: Ratios = json.loads(done.stdout.strip().splitlines()[-1])
    return ratios


@contextmanager
def tree_of(revision: str) -> Iterator[Path]:
    """Check out the files of a commit into a temporary folder."""
    with tempfile.TemporaryDirectory(prefix="stretto-quick-") as folder:
        git = ["git", "-C", str(ROOT), "worktree"]
        subprocess.run([*git, "add", "--detach", folder, revision], check=True, capture_output=True)
        try:
            yield Path(folder)
        finally:
            subprocess.run([*git, "remove", "--force", folder], check=True, capture_output=True)


def fell(before: Ratios, now: Ratios) -> bool:
    """Whether the median of a ratio fell by more than is allowed, and the upper quartile of now is below the lower one
    of before."""
    worse, better = statistics.median(before), statistics.median(now)
    return better < (1 - ALLOWED) * worse and _quartile(now, 0.75) < _quartile(before, 0.25)


def _quartile(ratios: Ratios, share: float) -> float:
    return sorted(ratios)[round(share * (len(ratios) - 1))]


def course() -> list[dict[str, Any]]:
    """Ratios on record for this processor, oldest first."""
    for path in sorted(report.RESULTS.glob("quick*.json")):
        content = json.loads(path.read_text())
        if content["machine"]["processor"] == machine().processor:
            return list(content["results"]["course"])
    return []


def revision() -> str:
    """Commit of this tree."""
    said = subprocess.run(["git", "-C", ROOT, "rev-parse", "--short=8", "HEAD"], capture_output=True, text=True)
    return said.stdout.strip() or "none"


def compare(names: list[str], against: str | None) -> tuple[dict[str, Ratios], bool]:
    """Measure the ratios `names`, print them, and compare them with those of the commit `against` (None: with the
    newest on record); the flag says whether anything failed or became slower."""
    before = last_points(course())
    table, found, bad = Table("ratio", "before", "now", "change", ""), dict[str, Ratios](), False
    with tree_of(against) if against else nullcontext() as other:
        for name in names:
            now, earlier = measured(name, ROOT), measured(name, other) if other else before.get(name, "not on record")
            if isinstance(now, str):
                table.add(TEN[name], "", now, "", "FAILED")
                bad = True
            else:
                found[name] = now
                row = _row(now, earlier)
                bad |= row[-1] == "SLOWER"
                table.add(TEN[name], *row)
            table.show_last()
    return found, bad


def _row(now: Ratios, before: Ratios | str) -> tuple[str, str, str, str]:
    if isinstance(before, str):
        return before, f"{statistics.median(now):.3g}", "", ""
    change = statistics.median(now) / statistics.median(before) - 1
    sign = "SLOWER" if fell(before, now) else ""
    return f"{statistics.median(before):.3g}", f"{statistics.median(now):.3g}", f"{change:+.0%}", sign


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", metavar="REVISION", help="the commit to compare with")
    parser.add_argument("--only", nargs="+", choices=list(TEN), default=list(TEN), help="some of the ten")
    parser.add_argument("--record", action="store_true", help="add what was measured to the course")
    parser.add_argument("--one", choices=list(TEN), help=argparse.SUPPRESS)
    words = parser.parse_args()
    if words.one:
        torch.set_num_threads(1)
        print(json.dumps([float(f"{ratio:.4g}") for ratio in BENCHMARKS[words.one]()]))
        return 0
    found, bad = compare(words.only, words.against)
    if words.record:
        day = time.strftime("%Y-%m-%d", time.gmtime())
        point = {"version": __version__, "commit": revision(), "measured": day, "ratios": found}
        save("quick", {"course": [*course(), point]})
    return int(bad)


if __name__ == "__main__":
    sys.exit(main())
