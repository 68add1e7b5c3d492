"""`stretto plan --calibrate`: measure this machine, and write its record for plans."""

from __future__ import annotations

import errno
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path

import msgspec

from stretto.core.errors import RoleDied
from stretto.store.files import write_atomically
from stretto.store.inspection import Inspection
from stretto.store.run_folder import RunFolder
from stretto_app.extensions.commands.plan import job_of
from stretto_foresight.planner.fit import RunPair, RunSample, fit_runs
from stretto_foresight.planner.machine import MachineProfile
from stretto_foresight.planner.measure import calibrate
from stretto_report.dashboard.prediction import terms_of_run
from stretto_report.reading.inspection import inspect_run
from stretto_report.reading.series import iterate_spans

_PATIENCE = 300.0
_WIDTHS = (64, 128)  # hidden sizes of the models in the runs
_IN_TURN = ("rollout.max_staleness=0", "rollout.max_in_flight=8")
_BESIDE = ("rollout.max_staleness=4", "rollout.max_in_flight=12", "trainer.steps=80")
_COMPLETIONS = 64  # completions in a batch of these runs
_RECIPE = """
task.kind = "arithmetic"
rewards.function = "final_answer"
sampling.max_tokens = 96
rollout = { batch_size = 8, group_size = 8 }
trainer = { steps = 40, minibatches = 1 }
evaluation.prompts = 8

[model.build]
family = "qwen3"
hidden_size = 128
layers = 2
heads = 4
kv_heads = 2
head_dim = 32
intermediate_size = 256
context_length = 128
alphabet = "0123456789+-=abcdefghijklmnopqrstuvwxyz"
"""


def calibrate_machine(out: Path, say: Callable[[str], None]) -> MachineProfile:
    """Measure the roles in isolation, correct the result by short runs, write the record to `out` and return it. It
    takes about two minutes. `say` gets progress messages.

    Raises:
        OSError: `out` cannot be written.
        RoleDied: a run failed, or did not end in time.
    """
    _check_writable(out)  # before two minutes are spent
    machine, pairs, between = calibrate(say), list[RunPair](), list[Mapping[str, float]]()
    with tempfile.TemporaryDirectory(prefix="stretto-calibrate-") as folder:
        recipe = Path(folder) / "calibration.toml"
        recipe.write_text(_RECIPE, encoding="utf-8")
        for width in _WIDTHS:
            model = f"model.build.hidden_size={width}"
            in_turn = short_run(recipe, Path(folder) / f"in-turn-{width}", (*_IN_TURN, model))
            beside = short_run(recipe, Path(folder) / f"beside-{width}", (*_BESIDE, model))
            say(f"measured: two runs of a model of width {width}, in turn and beside each other")
            between.append(between_roles(inspect_run(in_turn)) | between_steps(beside))
            pairs.append(
                RunPair(_sample(recipe, in_turn, (*_IN_TURN, model)), _sample(recipe, beside, (*_BESIDE, model)))
            )
    known = {name: statistics.fmean(one[name] for one in between) for name in between[0]}
    whole = fit_runs(msgspec.structs.replace(machine, **known), pairs)
    write_atomically(out, msgspec.json.format(msgspec.json.encode(whole)) + b"\n")
    return whole


def _sample(recipe: Path, run: Path, overrides: Sequence[str]) -> RunSample:
    measured = terms_of_run(RunFolder.open(run))
    assert measured is not None, "the run has trained"
    return RunSample(job_of(recipe, overrides, str(run), lambda text: None), measured)


def between_roles(run: Inspection) -> dict[str, float]:
    """Fields of `MachineProfile` that only a whole run shows, from a synchronous run: seconds of conductor, server and
    judge per trained completion, and seconds of the start.

    Of the time outside of generation and training, the conductor's part is the time for which its process was busy; the
    rest is the engine server's.
    """
    completions = run.trajectories.trained
    idle = 1.0 - run.busy["engine-0"] - run.busy["trainer"]
    return {
        "conduct_seconds": run.busy["conductor"] * run.rl_seconds / completions,
        "serve_seconds": max(0.0, idle - run.busy["conductor"]) * run.rl_seconds / completions,
        "judge_seconds": run.busy.get("rewards", 0.0) * run.rl_seconds / completions,
        "start_seconds": run.wall_seconds - run.rl_seconds,
    }


def between_steps(run: Path) -> dict[str, float]:
    """Field ``batch_seconds`` of `MachineProfile`: seconds of the conductor between two training steps, per completion,
    from an asynchronous run with batches of 64 completions. It is the lower quartile of the gaps between steps, because
    at least a quarter of the steps find their next batch complete. Raises statistics.StatisticsError for fewer than two
    gaps."""
    spans = sorted(
        (span.start, span.end, span.name) for span in iterate_spans(RunFolder.open(run).spans) if span.role == "trainer"
    )
    gaps = [start - end for (_, end, _), (start, _, name) in pairwise(spans) if name == "proximal"]
    return {"batch_seconds": statistics.quantiles(gaps, n=4)[0] / _COMPLETIONS}


def _check_writable(out: Path) -> None:
    """Raise OSError if `out` cannot be created or replaced. An existing file is not changed."""
    try:
        if out.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        tempfile.TemporaryFile(dir=out.parent).close()
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(out)) from None


def short_run(recipe: Path, run: Path, overrides: Sequence[str], patience: float = _PATIENCE) -> Path:
    """Train the calibration recipe, with `overrides` (``section.key=value``), in the folder `run`, in a process of its
    own; return `run`.

    Raises:
        RoleDied: the run failed, or did not end within `patience` seconds.
    """
    name = "the run of the calibration"
    command = (sys.executable, "-m", "stretto_app.cli.main", "train", str(recipe), *overrides, "--run-dir", str(run))
    try:
        done = subprocess.run(
            command, capture_output=True, encoding="utf-8", errors="replace", check=False, timeout=patience
        )
    except subprocess.TimeoutExpired:
        raise RoleDied(name, f"did not end within {patience:g} s") from None
    if done.returncode:
        raise RoleDied(name, f"ended with {done.returncode}: {done.stderr[-400:]}")
    return run
