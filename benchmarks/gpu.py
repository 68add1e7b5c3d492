"""Everything that only a GPU can show, in one command: `make gpu`. No network; one file,
benchmarks/results/gpu.json.

    python -m benchmarks.gpu                                on a machine with a GPU, within 25 minutes
    python -m benchmarks.gpu --parts decode profile
    python -m benchmarks.gpu --rehearse                     the same code on a processor, at tiny sizes; into build/

Parts run in the order of their value, each in a process of its own with a time limit. The file is written after each
part; a part that fails or takes too long is named in it with the reason and does not stop the others.

    tests      kernels, captured graphs and reading of rows are right (the tests that need a GPU)
    decode     tokens per second of the engine, as a share of what the memory allows
    training   tokens per second of the trainer, share of the peak (MFU), memory
    run        an asynchronous run of a 0.6B shape: tokens per second of both sides, pause of an update
    memory     peak memory of a training step beside the estimate of `--dry-run`
    kernels    milliseconds of each fused kernel beside the plain computation
    drawing    milliseconds of sampling in one kernel, beside torch's; share of equal tokens, and differences
    publication  a step alone and during the writing of a version, and whether the copied version is written
    ranks      losses of several ranks beside those of one, where there are several GPUs
    profile    what a training step and a decode step spend their time on, and how often they wait for the GPU
    vllm       the engine beside vLLM, if --vllm names an interpreter that has it
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch

from benchmarks import gpu_parts, gpu_sides
from benchmarks.gpu_parts import REHEARSED, Asked, Size
from benchmarks.report import Table, save
from stretto.processes.tree import kill_marked
from stretto.store.files import write_atomically
from stretto.store.provenance import machine

ROOT = Path(__file__).resolve().parent.parent
BUDGET = 25 * 60.0  # seconds of all parts
#: Seconds that each part may take, in the order in which they run; the last ones have what is left of all.
LIMITS = {
    "tests": 150,
    "decode": 240,
    "training": 180,
    "run": 270,
    "memory": 75,
    "kernels": 75,
    "drawing": 45,
    "publication": 75,
    "profile": 75,
    "ranks": 165,
    "vllm": 150,
}
PARTS = {**gpu_parts.PARTS, **gpu_sides.PARTS}
_TOLD, _SHOWN = 4000, 100  # characters of a reason, in the file and on the screen
_MARK = "STRETTO_GPU_PART"  # in the environment of a part and of all that it starts
_REHEARSAL = ROOT / "build" / "gpu-rehearsal.json"


def main(words: Sequence[str] | None = None) -> int:
    """Run the parts; return the exit status: 0; 1 if a part failed; 2 without a GPU."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=tuple(LIMITS), default=tuple(LIMITS))
    parser.add_argument("--rehearse", action="store_true", help="on the processor, at tiny sizes")
    parser.add_argument("--vllm", default=os.environ.get("STRETTO_VLLM", ""), help="an interpreter that has vLLM")
    parser.add_argument("--one", help=argparse.SUPPRESS)  # a part, in a process of its own
    asked = parser.parse_args(words)
    if asked.one:
        return _one(asked.one, asked.rehearse, asked.vllm)
    if not asked.rehearse and not torch.cuda.is_available():
        print("no GPU that torch can use: nothing is measured (--rehearse runs the code without one)", file=sys.stderr)
        return 2
    results: dict[str, Any] = {}
    table, end = Table("part", "seconds", "ended"), time.monotonic() + BUDGET
    for name in (name for name in LIMITS if name in asked.parts):
        began = time.monotonic()
        results[name] = measured(name, asked.rehearse, asked.vllm, min(LIMITS[name], end - began))
        results[name]["part_seconds"] = round(time.monotonic() - began, 1)
        _write(results, asked.rehearse)
        told = results[name].get("failed", "well").partition("\n")[0][:_SHOWN]
        table.add(name, results[name]["part_seconds"], told)
        table.show_last()
    return 1 if any("failed" in part for part in results.values()) else 0


def measured(name: str, rehearse: bool, vllm: str, limit: float) -> dict[str, Any]:
    """Run a part in a process of its own; return its results, or why there are none."""
    with tempfile.TemporaryDirectory(prefix="stretto-gpu-") as folder:
        found = Path(folder) / "found.json"
        command = [sys.executable, "-m", "benchmarks.gpu", "--one", f"{name}:{found}", "--vllm", vllm]
        environment = os.environ | {"PYTHONPATH": str(ROOT), "TMPDIR": folder}
        if rehearse:
            command.append("--rehearse")
            environment |= {"CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "1"}
        code = ended(command, environment, limit)
        if code is None:
            return {"failed": f"not done after {limit:.3g} s"}
        if code != 0 or not found.exists():
            return {"failed": f"ended with exit code {code}"} | (_read(found) if found.exists() else {})
        return _read(found)


def ended(command: Sequence[str], environment: Mapping[str, str], limit: float) -> int | None:
    """The exit code of a command; None if it was stopped for its time. Nothing that it has started is left, in sessions
    of its own either, as roles and servers are: they would hold memory of the GPU that the next part measures."""
    mark = uuid.uuid4().hex
    process = subprocess.Popen(command, cwd=ROOT, env={**environment, _MARK: mark}, start_new_session=True)
    try:
        return process.wait(max(0.0, limit))
    except subprocess.TimeoutExpired:
        return None
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        kill_marked(f"{_MARK}={mark}")
        process.wait()


def _read(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text())
    return content


def _one(told: str, rehearse: bool, vllm: str) -> int:
    name, _, path = told.partition(":")
    size = REHEARSED if rehearse else Size()
    try:
        found = PARTS[name](Asked(size, torch.device("cpu" if rehearse else "cuda"), Path(path).parent, vllm))
    except Exception as error:  # of whatever a driver, a kernel or a run does here first: the file says which
        traceback.print_exc()
        found = {"failed": f"{type(error).__name__}: {error}"[:_TOLD]}
    write_atomically(Path(path), msgspec.json.encode(found))
    return 0 if "failed" not in found else 1


def _write(results: dict[str, Any], rehearse: bool) -> None:
    if not rehearse:
        save("gpu", results)
        return
    _REHEARSAL.parent.mkdir(exist_ok=True)
    content = {"benchmark": "gpu", "machine": machine(), "results": results}
    write_atomically(_REHEARSAL, msgspec.json.format(msgspec.json.encode(content), indent=1) + b"\n")


if __name__ == "__main__":
    sys.exit(main())
