"""`stretto plan --calibrate`: measure this machine, and write what a plan needs of it."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import msgspec

from stretto.core.errors import RoleDied
from stretto.planner.machine import MachineProfile
from stretto.planner.measure import calibrate
from stretto.store.files import write_atomically
from stretto.store.inspection import Inspection, inspect_run

_STEPS, _COMPLETIONS = 40, 64
_PATIENCE = 300.0
_RECIPE = f"""
[model.build]
family = "qwen3"
hidden_size = 64
layers = 2
heads = 4
kv_heads = 4
head_dim = 16
intermediate_size = 128
context_length = 128
alphabet = "0123456789+-="

[task]
kind = "arithmetic"

[sampling]
max_tokens = 32

[rollout]
batch_size = 8
group_size = 8
max_in_flight = 8
max_staleness = 0

[rewards]
function = "final_answer"

[evaluation]
prompts = 8

[trainer]
steps = {_STEPS}
minibatches = 1
"""


def calibrate_machine(out: Path, say: Callable[[str], None]) -> MachineProfile:
    """Measure the roles alone, and then a short synchronous run, whose seconds beside generation and training are those
    of the conductor and of the engine's server. Writes the record to `out`.

    Raises:
        OSError: it cannot be written.
        RoleDied: the run failed, or did not end in time.
    """
    _check_writable(out)  # before two minutes are spent
    machine = calibrate(say)
    with tempfile.TemporaryDirectory(prefix="stretto-calibrate-") as folder:
        run = short_run(Path(folder))
    say("measured: a short run")
    whole = msgspec.structs.replace(machine, **between_roles(run))
    write_atomically(out, msgspec.json.format(msgspec.json.encode(whole)) + b"\n")
    return whole


def between_roles(run: Inspection) -> dict[str, float]:
    """The fields of `MachineProfile` that only a whole run shows. What of a synchronous step is neither generation nor
    training is the conductor's, as far as its process worked; the rest is the engine's server's."""
    completions = run.trajectories.trained
    idle = 1.0 - run.busy["engine-0"] - run.busy["trainer"]
    return {
        "conduct_seconds": run.busy["conductor"] * run.rl_seconds / completions,
        "serve_seconds": max(0.0, idle - run.busy["conductor"]) * run.rl_seconds / completions,
        "judge_seconds": run.busy.get("rewards", 0.0) * run.rl_seconds / completions,
        "start_seconds": run.wall_seconds - run.rl_seconds,
    }


def _check_writable(out: Path) -> None:
    """Raises OSError where no file of this name can be made; one that is there stays as it is."""
    try:
        if out.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        tempfile.TemporaryFile(dir=out.parent).close()
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(out)) from None


def short_run(folder: Path, patience: float = _PATIENCE) -> Inspection:
    """A run of the calibration, in `folder`.

    Raises:
        RoleDied: it failed, or did not end in `patience` seconds.
    """
    name = "the run of the calibration"
    recipe, run = folder / "calibration.toml", folder / "run"
    recipe.write_text(_RECIPE, encoding="utf-8")
    command = (sys.executable, "-m", "stretto.cli.main", "train", str(recipe), "--run-dir", str(run))
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=patience)
    except subprocess.TimeoutExpired:
        raise RoleDied(name, f"did not end within {patience:g} s") from None
    if done.returncode:
        raise RoleDied(name, f"ended with {done.returncode}: {done.stderr[-400:]}")
    return inspect_run(run)
