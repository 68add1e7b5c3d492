"""Does the memory of a role grow over a run, and the disk over its checkpoints?

    python -m benchmarks.growth memory [--steps 2000]
    python -m benchmarks.growth checkpoints [--count 100]

memory: one run of a tiny model, in which all roles do everything that they do in a long run: updates interrupt
conversations of two turns, evaluations, checkpoints and canaries recur, versions are served to other machines, and
TensorBoard gets the metrics. The run measures its own roles (`memory` in ``metrics.jsonl``), and this program the fork
server, the weights server and the process that follows the run for TensorBoard. The alarm about memory that grows is
asked about all of them. The first tenth of the steps fills caches and is left out. The slope is that of a least squares
line.

checkpoints: one run with a checkpoint after every step. The size of its checkpoints and policies is measured each time
a step is on record. The limit is what `store.keep_checkpoints` and `trainer.keep_versions` allow, plus one checkpoint
and one policy that are being written.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from benchmarks.report import Table, save
from stretto.processes.tree import descendants, own_resident_bytes
from stretto.store.run_folder import RunFolder
from stretto.store.series.metrics import StepMetrics, read_metrics
from stretto_report.audit.alarms import findings_of
from stretto_report.audit.check import check_run
from stretto_report.audit.evidence import Evidence
from stretto_report.reading.inspection import inspect_run

RECIPE = Path(__file__).resolve().parent.parent / "tests" / "launch" / "recipes" / "tiny.toml"
_SETTINGS = (
    "trainer.keep_versions=1",
    "trainer.checkpoint_every=20",
    "evaluation.every=50",
    "rollout.max_staleness=2",
    "sampling.max_tokens=32",
    "workflow.function=multi_turn",
    "workflow.settings.tries=2",
    'workflow.settings.feedback="="',
    "cluster.listen=127.0.0.1:0",
    "logging.to=tensorboard",
)
#: Processes that no metric of a run has, by what their command line has.
_WEIGHED = {
    "fork server": "stretto_app.forking.role",
    "weights server": "stretto_cluster.weights.server",
    "outlet": "stretto_report.outlets.role",
}
_LOOK_SECONDS = 2.0
_KEPT = 2  # checkpoints, and policies beside the first and the last

Points = list[tuple[int, float]]  # steps, and MiB then
Looks = Sequence[tuple[int, Mapping[str, float]]]  # newest step on record, and MiB of each process of `_WEIGHED`


def of_roles(steps: Sequence[StepMetrics]) -> dict[str, Points]:
    """Memory of each role by step, as measured by the run."""
    found: dict[str, Points] = {}
    for step in steps:
        for role, size in step.memory.items():
            found.setdefault(role, []).extend([] if size is None else [(step.step, size)])
    return found


def weighed(command: int) -> dict[str, float]:
    """MiB of those processes of a command that the run's metrics do not have."""
    found = {}
    for pid in descendants(command):
        with contextlib.suppress(OSError):  # it has ended
            words = Path(f"/proc/{pid}/cmdline").read_text(errors="replace").replace("\0", " ")
            for name, module in _WEIGHED.items():
                if module in words:
                    found[name] = own_resident_bytes(pid) / 2**20
    return found


def together(steps: Sequence[StepMetrics], looks: Looks) -> list[StepMetrics]:
    """Steps whose memory has the processes of `looks` too, as they were at the last look before a step's record."""
    found, known = list[StepMetrics](), dict[str, float]()
    left = iter(looks)
    following = next(left, None)
    for step in steps:
        while following is not None and following[0] < step.step:
            known |= following[1]
            following = next(left, None)
        found.append(msgspec.structs.replace(step, memory={**step.memory, **known}))
    return found


def alarms_of_memory(steps: Sequence[StepMetrics]) -> list[str]:
    """Alarms of the run about memory that grows."""
    return [str(one) for one in findings_of(Evidence.of(steps)).alarms if "memory" in one.name]


def slopes(points: Mapping[str, Points], steps: int) -> dict[str, dict[str, float]]:
    """For each role: MiB after the first tenth of all steps and at the end, and MiB per 1,000 steps between them."""
    found = {}
    for role in sorted(points):
        at, sizes = np.array([(step, size) for step, size in points[role] if step > steps // 10]).T
        slope, _ = np.polyfit(at, sizes, 1)
        found[role] = {
            "begin": float(sizes[0]),
            "end": float(sizes[-1]),
            "per_1000_steps": round(1000 * float(slope), 3),
        }
    return found


def memory_table(results: Mapping[str, Any]) -> str:
    """Table of the memory for docs/explanation/complaints.md."""
    lines = [
        f"| role | MiB after {results['setting']['steps'] // 10} steps | MiB after {results['setting']['steps']:,} | "
        "MiB per 1,000 steps |",
        "|---|---|---|---|",
    ]
    for role, one in results["roles"].items():
        lines.append(f"| {role} | {one['begin']:.1f} | {one['end']:.1f} | {one['per_1000_steps']:.2f} |")
    return "\n".join(lines) + "\n"


def disk_table(results: Mapping[str, Any]) -> str:
    """Table of the disk for docs/explanation/complaints.md."""
    lines = ["| folder | bytes of one | most at once | ceiling |", "|---|---|---|---|"]
    for name, one in results["folders"].items():
        lines.append(f"| {name} | {one['one']:,} | {one['most']:,} | {one['ceiling']:,} |")
    return "\n".join(lines) + "\n"


def memory(steps: int) -> None:
    """Measure the run of many steps."""
    looks: list[tuple[int, dict[str, float]]] = []
    with tempfile.TemporaryDirectory(prefix="stretto-growth-") as parent:
        path = Path(parent) / "run"
        with started([f"trainer.steps={steps}", *_SETTINGS], path) as process:
            while process.poll() is None:
                time.sleep(_LOOK_SECONDS)
                known = read_metrics(path / "metrics.jsonl")[0] if (path / "metrics.jsonl").exists() else []
                looks.append((known[-1].step if known else 0, weighed(process.pid)))
        done, found = together(read_metrics(path / "metrics.jsonl")[0], looks), inspect_run(path)
        laws = check_run(path).kept
    sizes, alarms = slopes(of_roles(done), steps), alarms_of_memory(done)
    table = Table("role", "MiB after a tenth", "MiB at the end", "MiB per 1,000 steps")
    for role, one in sizes.items():
        table.add(role, round(one["begin"], 1), round(one["end"], 1), one["per_1000_steps"])
    table.show()
    print(f"{len(done)} steps in {found.rl_seconds:.0f} s; alarms: {alarms or 'none'}; laws kept: {laws}")
    setting = {"recipe": RECIPE.name, "steps": steps, "overrides": _SETTINGS}
    save("growth-memory", {"setting": setting, "roles": sizes, "alarms": alarms, "laws_kept": laws})


@contextlib.contextmanager
def started(overrides: Sequence[str], path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run training during the block.

    Raises:
        RuntimeError: the run failed.
    """
    command = [sys.executable, "-m", "stretto_app.cli.main", "train", str(RECIPE), *overrides, "--run-dir", str(path)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        yield process
    if process.returncode:
        raise RuntimeError(f"the run ended with exit code {process.returncode}")


def size_of(folder: Path) -> int:
    """Bytes of all files below `folder`; files that vanish meanwhile are left out."""
    total = 0
    for parent, _, files in os.walk(folder):
        for name in files:
            with contextlib.suppress(FileNotFoundError):
                total += os.stat(os.path.join(parent, name)).st_size
    return total


def checkpoints(count: int) -> None:
    """Measure the run with a checkpoint after every step."""
    overrides = [f"trainer.steps={count}", "trainer.checkpoint_every=1", f"trainer.keep_versions={_KEPT}"]
    overrides += [f"store.keep_checkpoints={_KEPT}"]
    with tempfile.TemporaryDirectory(prefix="stretto-growth-") as parent:
        path = Path(parent) / "run"
        folder, looked = RunFolder(path), dict[str, list[int]](checkpoints=[], policies=[])
        with started(overrides, path) as process:
            while process.poll() is None:
                time.sleep(0.02)
                if folder.checkpoints.exists() and folder.policies.exists():
                    looked["checkpoints"].append(size_of(folder.checkpoints))
                    looked["policies"].append(size_of(folder.policies))
        saved = [line for line in read_metrics(folder.metrics)[0] if line.step]
        one = {"checkpoints": _newest(folder.checkpoints), "policies": _newest(folder.policies)}
    allowed = {"checkpoints": _KEPT + 1, "policies": _KEPT + 2}
    found: dict[str, Any] = {}
    table = Table("folder", "bytes of one", "most at once", "ceiling")
    for name, sizes in looked.items():
        ceiling = allowed[name] * one[name]
        found[name] = {"one": one[name], "most": max(sizes), "ceiling": ceiling, "looks": len(sizes)}
        table.add(name, one[name], max(sizes), ceiling)
    table.show()
    save("growth-checkpoints", {"setting": {"overrides": overrides, "steps": len(saved)}, "folders": found})


def _newest(folder: Path) -> int:
    return size_of(max(path for path in folder.iterdir() if path.is_dir()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kinds = parser.add_subparsers(dest="kind", required=True)
    kinds.add_parser("memory").add_argument("--steps", type=int, default=2000)
    kinds.add_parser("checkpoints").add_argument("--count", type=int, default=100)
    words = parser.parse_args()
    if words.kind == "memory":
        memory(words.steps)
    else:
        checkpoints(words.count)


if __name__ == "__main__":
    main()
