"""Ratios of the project's ten goals in five minutes: has a commit made something slower?

    python -m benchmarks.quick                     compared with the committed ratios of this processor
    python -m benchmarks.quick --against REVISION  compared with another commit, in alternating runs
    python -m benchmarks.quick --record            also added to benchmarks/results/quick.json

Each ratio compares stretto with something that stretto cannot change (a product of matrices, a copy, an empty
interpreter, JSON of the standard library, transformers, a loop in plain torch) or with itself, measured in turns in one
process. Higher is better. It is a regression, with exit code 1, if a ratio fell by more than a tenth and by more than
the spread of the runs on either side, or can no longer be measured. Exit code 2: there is no regression, but a ratio
was compared with nothing, because it is not on record for this processor or cannot be measured on the other commit.
With `--against`, the benchmarks of this commit run with the packages of the other commit.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, NoReturn

from benchmarks import report
from benchmarks.quick_rows import RATIOS, Ratios, last_points
from benchmarks.report import Table, save
from stretto import __version__
from stretto.store.run_folder import machine

ROOT = Path(__file__).resolve().parent.parent
ALLOWED = 0.1  # of a ratio, that it may fall by
SECONDS = 240  # the most for one ratio
SHORT = ("warm_start.steps=100", "trainer.steps=80", "evaluation.prompts=32")  # of recipes/arithmetic.toml
FIRST = (*SHORT, "trainer.steps=2")  # compiles, and fills the caches
_HOW = "to put them on record: `make bench-quick RECORD=1`, on a machine that does nothing else"
SLOWER, FAILED, UNKNOWN = "SLOWER", "FAILED", "NOT COMPARED"


# ── the ratios ──────────────────────────────────────────────────────────────────────────────────────
# Each imports what it needs: another commit may lack what only one of them uses.


def demo() -> Ratios:
    """Seconds of 10^12 FLOPs of the fastest product, divided by those of a short `make demo` with an empty cache."""
    import torch

    from benchmarks.flops import ceiling
    from benchmarks.runs import train

    train(FIRST)
    found = []
    for _ in range(3):
        peak = ceiling(torch.float32, 0.5)
        with tempfile.TemporaryDirectory() as cache:
            start = time.perf_counter()
            train(SHORT, surroundings=os.environ | {"STRETTO_CACHE": cache})
            found.append(1e12 / peak / (time.perf_counter() - start))
    return found


def command(name: str) -> Ratios:
    """CPU seconds of an empty interpreter, divided by those of a command of `benchmarks.commands`."""
    from benchmarks.commands import COMMANDS, RIGHT, cpu_seconds, of_nothing

    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        found = [of_nothing(folder) / cpu_seconds(COMMANDS[name], folder, 0 if name in RIGHT else 2) for _ in range(8)]
    return found[1:]


def engine(model: str, tokens: int) -> Ratios:
    """Tokens per second of 64 sequences in float32, as a multiple of those of transformers' `generate`."""
    from benchmarks.generators import SYSTEMS, prompts, timed
    from benchmarks.shapes import make

    with tempfile.TemporaryDirectory() as place:
        folder, asked, found = make(model, Path(place)), prompts(64, 1024), []
        ways = [SYSTEMS[system](folder, "float32", 64) for system in ("transformers generate", "stretto")]
        for _ in range(4):
            theirs, ours = (timed(way, asked, tokens, 1)["seconds"] for way in ways)
            found.append(theirs / ours)
    return found[1:]  # the first steps of a size cost more


def asynchronous() -> Ratios:
    """Seconds of reinforcement of a synchronous run, divided by those of an asynchronous one."""
    from benchmarks.loop import ASYNCHRONOUS, TOGETHER
    from benchmarks.runs import train

    train(FIRST)
    found = []
    for _ in range(3):
        runs = [train([*SHORT, *way]) for way in (TOGETHER, ASYNCHRONOUS["every version"])]
        found.append(runs[0].inspection.rl_seconds / runs[1].inspection.rl_seconds)
    return found


def trajectories() -> Ratios:
    """Trained trajectories per second of an asynchronous run, as a multiple of those of a plain loop: transformers'
    `generate` until the longest answer ends, then a padded step."""
    from benchmarks.generators import prompts, transformers_generate
    from benchmarks.lengths import batch, load
    from benchmarks.loop import ASYNCHRONOUS
    from benchmarks.runs import train
    from benchmarks.training import of_recipe
    from benchmarks.training_steps import padded
    from stretto.model.hf.folder import inspect_model_folder

    train(FIRST)
    found = []
    with tempfile.TemporaryDirectory() as place:
        folder = of_recipe(Path(place))
        vocabulary = inspect_model_folder(folder).vocab_size
        generate, step, batches = transformers_generate(folder, "float32", 64), padded(folder, 64), load()[:3]
        for _ in range(3):
            ours, trained, start = train([*SHORT, *ASYNCHRONOUS["every version"]]), 0, time.perf_counter()
            for groups in batches:
                lengths = [length for _, answers in groups for length in answers]
                generate(prompts(len(lengths), vocabulary), max(lengths))
                step(batch(groups, vocabulary, 0))
                trained += len(lengths)
            found.append(ours.trained_per_second * (time.perf_counter() - start) / trained)
    return found


def network() -> Ratios:
    """Bytes per second of a 135M bfloat16 version from a weights server, as a share of a plain copy's."""
    from benchmarks.weights import MODELS, Policy, copy_seconds, place
    from stretto.model.hf.build import build_policy
    from stretto.weights.shared_memory import SharedMemoryPublisher

    found = []
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "135M"
        build_policy(MODELS["135M"], model, seed=1)
        policy = Policy(model)
        with place(model, policy.size) as there:
            publisher, mirror = SharedMemoryPublisher(there.run, there.home), there.mirror("never")
            for version in range(1, 9):
                publisher.publish(version, policy.step())
                copied = copy_seconds(there, version)
                found.append(copied / asyncio.run(mirror.pull(version)).seconds)
    return found[1:]


def conductor() -> Ratios:
    """Tokens of one conductor with 512 simulated engines, per JSON text that Python writes in the same CPU time."""
    from benchmarks.conductor import tokens_per_cpu_second
    from benchmarks.simulated_run import Setting
    from stretto.processes import event_loop

    found = []
    for _ in range(4):
        with tempfile.TemporaryDirectory() as folder:
            tokens = event_loop.run(tokens_per_cpu_second(Setting(512, 1, tokens=1024), Path(folder) / "run"))
        found.append(tokens / _json_per_second())
    return found[1:]


def _json_per_second() -> float:
    record = {"tokens": list(range(100)), "text": "1+2=3" * 20}
    start, count = time.process_time(), 0
    while time.process_time() - start < 0.5:
        json.dumps(record)
        count += 1
    return count / (time.process_time() - start)


def server() -> Ratios:
    """Tokens per second through the server with 64 streams, as a share of the engine's own."""
    from benchmarks.generators import prompts
    from benchmarks.serving import SLOTS, Load, engine_alone, serving
    from benchmarks.shapes import make
    from stretto.engine.config import EngineConfig
    from stretto.engine.native.engine import NativeEngine
    from stretto.model.hf.folder import inspect_model_folder
    from stretto.model.hf.tokenizer import load_tokenizer

    with tempfile.TemporaryDirectory() as place_of:
        folder = make("3.4M", Path(place_of))
        engine = NativeEngine.load(folder, EngineConfig(slots=SLOTS))
        ends, vocabulary = load_tokenizer(folder).eos_token_ids, inspect_model_folder(folder).vocab_size
        asked, found = prompts(2 * SLOTS, vocabulary), []
        with serving(folder) as address:
            for _ in range(4):
                alone = engine_alone(engine, ends, asked, SLOTS)
                answered, seconds = asyncio.run(Load(address, "3.4M").run(asked, SLOTS))
                found.append(sum(one.tokens for one in answered) / seconds / alone)
    return found[1:]  # the first steps of a size cost more


def training() -> Ratios:
    """Share of the fastest product's rate that a training step of 48M in bfloat16 reaches."""
    from benchmarks.shapes import make
    from benchmarks.training_steps import utilisation

    with tempfile.TemporaryDirectory() as folder:
        model = make("48M", Path(folder))
        return [float(utilisation(model, "bfloat16", 1, 1)["fraction"]) for _ in range(3)]


def going_on(*, whole: bool) -> Ratios:
    """CPU seconds of an empty interpreter, divided by those of a resume to its next step (`whole`), or of the
    processes that replace trainer, engine and rewards, to the second step."""
    from benchmarks.commands import of_nothing
    from benchmarks.restarts import SETTINGS, each_replaced, resumed
    from stretto.core.machine import cache_folder
    from tests.launch.running import Laboratory

    with tempfile.TemporaryDirectory() as place:
        root, laboratory = Path(place), Laboratory(Path(place), cache_folder())
        roles = () if whole else ("trainer", "engine", "rewards")
        costs = each_replaced(laboratory, root / "run", SETTINGS, roles, 3)
        spent = [resumed(laboratory, root / "run")["cpu"] for _ in range(3 if whole else 0)]
        spent += [sum(cost["cpu"] for cost in each) for each in zip(*costs.values(), strict=True)]
        return [of_nothing(root) / seconds for seconds in spent]


BENCHMARKS: dict[str, Callable[[], Ratios]] = {
    "demo": demo,
    "help": lambda: command("--help"),
    "wrong-key": lambda: command("train, a wrong key"),
    "engine-3.4M": lambda: engine("3.4M", 96),
    "engine-48M": lambda: engine("48M", 24),
    "asynchronous": asynchronous,
    "trajectories": trajectories,
    "network-135M": network,
    "conductor-tokens": conductor,
    "server": server,
    "train-48M-bfloat16": training,
    "resume": lambda: going_on(whole=True),
    "replaced": lambda: going_on(whole=False),
}


# ── both sides, in turn ─────────────────────────────────────────────────────────────────────────────


def measured(name: str, packages: Path) -> Ratios | str:
    """Measure a ratio in its own process, with the packages of a tree; a text says why it could not be
    measured."""
    ours = sorted(path.parent.relative_to(ROOT) for path in ROOT.glob("packages/*/pyproject.toml"))
    if lacking := [str(path) for path in ours if not (packages / path).is_dir()]:
        return f"has no {', '.join(lacking)}"[:90]  # that of this commit would run instead
    paths = [ROOT, *sorted((packages / "packages").iterdir()), packages / "application"]
    surroundings = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, paths)), "OMP_NUM_THREADS": "1"}
    line = [sys.executable, "-m", "benchmarks.quick", "--one", name]
    try:
        done = subprocess.run(line, env=surroundings, cwd=ROOT, capture_output=True, text=True, timeout=2 * SECONDS)
    except subprocess.TimeoutExpired:
        return f"did not end within {2 * SECONDS} s"
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


def commit(revision: str = "HEAD") -> str:
    """Short name of a commit of this tree; "none" if there is no such commit."""
    line = ["git", "-C", str(ROOT), "rev-parse", "--verify", "--short=8", f"{revision}^{{commit}}"]
    return subprocess.run(line, capture_output=True, text=True, check=False).stdout.strip() or "none"


def compare(names: list[str], against: str | None) -> tuple[dict[str, Ratios], dict[str, str]]:
    """Measure the ratios `names`, print them, and compare them with those of the commit `against` (None: with the
    newest on record). Returns what was measured, and the sign of each name that has one."""
    before = last_points(course())
    table, found, signs = Table("ratio", "before", "now", "change", "", "s"), dict[str, Ratios](), dict[str, str]()
    with tree_of(against) if against else nullcontext() as other:
        for name in names:
            start = time.monotonic()
            now = measured(name, ROOT)
            row = _row(now, measured(name, other) if other else before.get(name, "not on record"))
            table.add(RATIOS[name], *row, round(time.monotonic() - start))
            table.show_last()
            if row[-1]:
                signs[name] = row[-1]
            if not isinstance(now, str):
                found[name] = now
    return found, signs


def _row(now: Ratios | str, before: Ratios | str) -> tuple[str, str, str, str]:
    was, is_now = (text if isinstance(text, str) else f"{statistics.median(text):.3g}" for text in (before, now))
    if isinstance(before, str):
        return was, is_now, "", UNKNOWN
    if isinstance(now, str):
        return was, is_now, "", FAILED
    change = statistics.median(now) / statistics.median(before) - 1
    return was, is_now, f"{change:+.0%}", SLOWER if fell(before, now) else ""


def _late(*_: object) -> NoReturn:
    raise TimeoutError(f"took more than {SECONDS} s")  # so that everything that it has started ends


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", metavar="REVISION", help="the commit to compare with")
    parser.add_argument("--only", nargs="+", choices=list(RATIOS), default=list(RATIOS), help="some of the ratios")
    parser.add_argument("--record", action="store_true", help="add what was measured to the course")
    parser.add_argument("--one", choices=list(RATIOS), help=argparse.SUPPRESS)
    words = parser.parse_args()
    if words.one:
        signal.signal(signal.SIGALRM, _late)
        signal.alarm(SECONDS)
        print(json.dumps([float(f"{ratio:.4g}") for ratio in BENCHMARKS[words.one]()]))
        return 0
    if words.against and commit(words.against) == "none":
        parser.error(f"--against: there is no commit {words.against!r}")
    found, signs = compare(words.only, words.against)
    if words.record:
        day = time.strftime("%Y-%m-%d", time.gmtime())
        point = {"version": __version__, "commit": commit(), "measured": day, "ratios": found}
        save("quick", {"course": [*course(), point]})
    return verdict(signs, words.against, found if words.record else ())


def verdict(signs: Mapping[str, str], against: str | None, recorded: Collection[str]) -> int:
    """Say which ratios were compared with nothing and are not `recorded` now; return the exit code of the command."""
    unknown = {name for name, sign in signs.items() if sign == UNKNOWN}
    left = unknown if against else unknown.difference(recorded)
    if left:
        why = f"cannot be measured on {against}" if against else f"not on record for {machine().processor}"
        print(f"compared with nothing ({why}): {', '.join(sorted(left))}" + ("" if against else f"\n{_HOW}"))
    return 1 if len(unknown) < len(signs) else 2 if left else 0


if __name__ == "__main__":
    sys.exit(main())
