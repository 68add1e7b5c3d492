"""Everything that only a GPU can show, in one command: `make gpu`. No network; one file,
benchmarks/results/gpu.json.

    python -m benchmarks.gpu                                on a machine with a GPU, within 25 minutes
    python -m benchmarks.gpu --parts decode profile
    python -m benchmarks.gpu --budget 240                   what fits into 240 seconds
    python -m benchmarks.gpu --parts learn --keep           the file keeps what it has of other parts
    python -m benchmarks.gpu --rehearse                     the same code on a processor, at tiny sizes; into build/

Parts run in the order of their value, each with a time limit. They share a process, since its start takes as long as
some of them; one that fails or takes too long ends with it, is named in the file with the reason and does not stop the
others. The file is written after each part. With a budget, a part that would not fit into what is left is skipped.

    decode     tokens per second of the engine, as a share of what the memory allows
    training   tokens per second of the trainer, share of the peak (MFU), memory
    beside     the engine beside transformers' `generate`, a training step beside one with padded rows
    run        an asynchronous run of a 0.6B shape: tokens per second of both sides, pause of an update
    kernels    milliseconds of each fused kernel beside the plain computation
    drawing    milliseconds of sampling in one kernel, beside torch's; share of equal tokens, and differences
    memory     peak memory of a training step beside the estimate of `--dry-run`
    publication  a step alone and during the writing of a version, and whether the copied version is written
    profile    what a training step and a decode step spend their time on, and how often they wait for the GPU
    tests      kernels, captured graphs and reading of rows are right (the tests that need a GPU)
    learn      a whole run of the task of recipes/arithmetic.toml with 27M parameters, to a held-out accuracy of 0.9
    continuous   transformers' `generate_batch` on the work of `beside`
    compiled   transformers' compiled `generate` on it
    ranks      losses of several ranks beside those of one, where there are several GPUs
    vllm       the engine beside vLLM, if --vllm names an interpreter that has it
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch

from benchmarks import gpu_parts, gpu_peers, gpu_sides
from benchmarks.gpu_parts import REHEARSED, Asked, Size
from benchmarks.report import RESULTS, Table, save
from stretto.processes.tree import kill_marked
from stretto.store.files import write_atomically
from stretto.store.run_folder import machine

ROOT = Path(__file__).resolve().parent.parent
BUDGET = 25 * 60.0  # seconds of all parts
#: Seconds that each part may take at most, and about how many it takes on an H100, in the order in which they run.
LIMITS = {
    "decode": (120, 55),
    "training": (90, 21),
    "beside": (90, 70),
    "run": (180, 60),
    "kernels": (60, 8),
    "drawing": (45, 5),
    "memory": (60, 6),
    "publication": (60, 15),
    "profile": (60, 12),
    "tests": (120, 30),
    "learn": (150, 60),
    "continuous": (75, 25),
    "compiled": (75, 45),
    "ranks": (165, 1),
    "vllm": (150, 1),
}
PARTS = {**gpu_parts.PARTS, **gpu_sides.PARTS, **gpu_peers.PARTS}
_PAUSE = 0.05  # seconds between two looks at a part
_TOLD, _SHOWN = 4000, 100  # characters of a reason, in the file and on the screen
_MARK = "STRETTO_GPU_PART"  # in the environment of a part and of all that it starts
_REHEARSAL = ROOT / "build" / "gpu-rehearsal.json"


def main(words: Sequence[str] | None = None) -> int:
    """Run the parts; return the exit status: 0; 1 if a part failed; 2 without a GPU."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=tuple(LIMITS), default=tuple(LIMITS))
    parser.add_argument("--budget", type=float, default=BUDGET, help="seconds of all parts; those that do not fit wait")
    parser.add_argument("--keep", action="store_true", help="other parts keep their results of this machine")
    parser.add_argument("--rehearse", action="store_true", help="on the processor, at tiny sizes")
    parser.add_argument("--vllm", default=os.environ.get("STRETTO_VLLM", ""), help="an interpreter that has vLLM")
    parser.add_argument("--serve", help=argparse.SUPPRESS)  # the folder of a process that does parts
    asked = parser.parse_args(words)
    if asked.serve:
        return serve(Path(asked.serve), asked.rehearse, asked.vllm)
    if not asked.rehearse and not torch.cuda.is_available():
        print("no GPU that torch can use: nothing is measured (--rehearse runs the code without one)", file=sys.stderr)
        return 2
    results = _kept() if asked.keep and not asked.rehearse else {}
    parts = [name for name in LIMITS if name in asked.parts]
    table = Table("part", "seconds", "ended")
    for name, found in measured(parts, asked.rehearse, asked.vllm, asked.budget):
        results[name] = found
        _write({one: results[one] for one in LIMITS if one in results}, asked.rehearse)
        told = found.get("failed") or found.get("skipped") or "well"
        table.add(name, found["part_seconds"], told.partition("\n")[0][:_SHOWN])
        table.show_last()
    return 1 if any("failed" in results[name] for name in parts) else 0


def measured(
    parts: Sequence[str], rehearse: bool, vllm: str, budget: float = BUDGET
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each part with its results, or why there are none; a part for which the `budget` (seconds) no longer
    suffices is skipped. `rehearse`: small sizes, on the CPU, without a budget. `vllm`: an interpreter with vLLM, or "".
    A process does one part after another; after one that has failed the next has a new process."""
    end, worker = time.monotonic() + budget, None
    try:
        for name in parts:
            began = time.monotonic()
            most, typical = LIMITS[name]
            left = end - began
            if left < min(typical, most) and not rehearse:
                found: dict[str, Any] = {"skipped": f"takes about {typical} s, and {left:.0f} s were left"}
            else:
                worker = worker or Worker(rehearse, vllm)
                found = worker.part(name, min(most, left))
            if "failed" in found and worker is not None:
                worker.close()
                worker = None
            yield name, found | {"part_seconds": round(time.monotonic() - began, 1)}
    finally:
        if worker is not None:
            worker.close()


class Worker:
    """A process that does parts, and everything that it starts."""

    def __init__(self, rehearse: bool, vllm: str) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="stretto-gpu-")
        self._mark = uuid.uuid4().hex
        command = [sys.executable, "-m", "benchmarks.gpu", "--serve", self._folder.name, "--vllm", vllm]
        environment = os.environ | {"PYTHONPATH": _python_path(), "TMPDIR": self._folder.name, _MARK: self._mark}
        if rehearse:
            command.append("--rehearse")
            environment |= {"CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "1"}
        self._process = subprocess.Popen(
            command, cwd=ROOT, env=environment, start_new_session=True, stdin=subprocess.PIPE, text=True
        )

    def part(self, name: str, limit: float) -> dict[str, Any]:
        """The results of a part, or why there are none."""
        path, end = Path(self._folder.name) / f"{name}.json", time.monotonic() + limit
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(f"{name}\n")
            self._process.stdin.flush()
        while not path.exists():
            if (code := self._process.poll()) is not None and not path.exists():
                return {"failed": f"ended with exit code {code}"}
            if time.monotonic() > end:
                return {"failed": f"not done after {limit:.3g} s"}
            time.sleep(_PAUSE)
        content: dict[str, Any] = json.loads(path.read_text())
        return content

    def close(self) -> None:
        """End the process and all that it has started, in sessions of its own too, as roles and servers are: they would
        hold memory of the GPU that the next part measures."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        kill_marked(f"{_MARK}={self._mark}")
        self._process.wait()
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._folder.cleanup()


def serve(folder: Path, rehearse: bool, vllm: str) -> int:
    """Do the parts that are named on the standard input; each has its results in a file of `folder`. `rehearse`,
    `vllm`: as in `measured`. Returns 0."""
    asked = Asked(REHEARSED if rehearse else Size(), torch.device("cpu" if rehearse else "cuda"), folder, vllm)
    for line in sys.stdin:
        name = line.strip()
        try:
            found = msgspec.to_builtins(PARTS[name](asked))
        except Exception as error:  # of whatever a driver, a kernel or a run does here first: the file says which
            traceback.print_exc()
            found = {"failed": f"{type(error).__name__}: {error}"[:_TOLD]}
        write_atomically(folder / f"{name}.json", msgspec.json.encode(found))
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    return 0


def _python_path() -> str:
    return os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))


def _kept() -> dict[str, Any]:
    """The results in the file, if they are of this machine's GPU."""
    path = RESULTS / "gpu.json"
    if not path.exists():
        return {}
    content = json.loads(path.read_text())
    return dict(content["results"]) if content["machine"]["accelerators"] == list(machine().accelerators) else {}


def _write(results: dict[str, Any], rehearse: bool) -> None:
    if not rehearse:
        save("gpu", results)
        return
    _REHEARSAL.parent.mkdir(exist_ok=True)
    content = {"benchmark": "gpu", "machine": machine(), "results": results}
    write_atomically(_REHEARSAL, msgspec.json.format(msgspec.json.encode(content), indent=1) + b"\n")


if __name__ == "__main__":
    sys.exit(main())
