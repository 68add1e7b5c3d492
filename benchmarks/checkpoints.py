"""Cost of a checkpoint: how long the update stops, beside a plain copy of the same bytes, and the time of each part.

    python -m benchmarks.checkpoints          a minute, on a machine that does nothing else

A trainer alone, one thread, after one step. `copy` is the time for which the update stops
(`trainer.checkpoint.TrainerState`). `plain` copies the same bytes, tensor by tensor, into newly allocated memory.
`write` writes the state into a folder, as a thread does during training. `seal` is the store's work after it
(checksums, sync to disk). `memory` is the peak memory of the process meanwhile, above its level before.
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.memory import forget_peak, peak_bytes, resident_bytes
from benchmarks.report import Table, save
from benchmarks.shapes import SHAPES, make
from stretto.core.records import Batch, Group, Outcome, Prompt, Segment, StopReason, Trajectory, Verdict
from stretto.model.hf.folder import load_policy
from stretto.store.checkpoints import Checkpoints
from stretto.trainer.config import TrainerConfig
from stretto.trainer.objective.algorithm import AlgorithmConfig
from stretto.trainer.trainer import Trainer

MIB = 2**20


def batch() -> Batch:
    """A batch of two short completions: after one step on it, AdamW has its moments."""
    prompt = Prompt(id="0", token_ids=(3, 4, 5), text="", answer="")
    answers = tuple(
        Trajectory(
            id=f"0.0.0/{member}",
            segments=(
                Segment.of(
                    token_ids=(3, 4),
                    behavior_logprobs=(-1.0, -1.0),
                    versions=(0, 0),
                    stop_reason=StopReason.LENGTH,
                ),
            ),
            verdict=Verdict(outcome=Outcome.RIGHT if member else Outcome.WRONG, reward=float(member)),
            text="",
        )
        for member in range(2)
    )
    group = Group(id="0.0.0", prompt=prompt, admitted_version=0, trajectories=answers)
    return Batch(step=1, version=0, groups=(group,), oldest_trainable=0)


def seconds(work: Callable[[], Any]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def state_of(trainer: Trainer) -> list[Tensor]:
    """Tensors that a checkpoint holds."""
    state = trainer.learner.adamw.state
    parameters = list(trainer.learner.model.parameters())
    return [tensor for p in parameters for tensor in (p.detach(), state[p]["exp_avg"], state[p]["exp_avg_sq"])]


def saved(checkpoints: Checkpoints, step: int, snapshot: Callable[[Path], None]) -> tuple[float, float]:
    """Seconds to write a checkpoint, and seconds to seal it."""
    writing: list[float] = []
    whole = seconds(lambda: checkpoints.save(step, lambda part: writing.append(seconds(lambda: snapshot(part)))))
    return writing[0], whole - writing[0]


def measured(trainer: Trainer, folder: Path, rounds: int) -> dict[str, Any]:
    """Medians over `rounds`, and the memory of the first round."""
    tensors = state_of(trainer)
    size = sum(tensor.nbytes for tensor in tensors)
    found: dict[str, list[float]] = {"copy": [], "plain": [], "write": [], "seal": [], "memory": []}
    checkpoints = Checkpoints(folder, keep=1)
    for number in range(rounds):
        ctypes.CDLL(None).malloc_trim(0)  # what was freed before is not there to be used again
        before = resident_bytes()
        forget_peak()
        start = time.perf_counter()
        snapshot = trainer.snapshot()
        found["copy"].append(time.perf_counter() - start)
        written = saved(checkpoints, number + 1, snapshot)
        del snapshot
        for part, took in zip(("write", "seal"), written, strict=True):
            found[part].append(took)
        found["memory"].append((peak_bytes() - before) / size)
        found["plain"].append(seconds(lambda: [tensor.clone() for tensor in tensors]))
    first = found.pop("memory")[0]  # later rounds find room that the first one has left
    return {"mib": size / MIB, "memory": first, **{name: statistics.median(all) for name, all in found.items()}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    table = Table("model", "MiB", "copy ms", "plain ms", "copy / plain", "write ms", "seal ms", "memory / size")
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="stretto-benchmark-") as root:
        for name in SHAPES:
            model = load_policy(make(name, Path(root) / name))
            trainer = Trainer(model, TrainerConfig(), AlgorithmConfig())
            trainer.train(batch())
            results[name] = one = measured(trainer, Path(root) / f"{name}-checkpoints", rounds)
            copy, plain = one["copy"], one["plain"]
            row = [f"{1000 * part:.0f}" for part in (copy, plain, one["write"], one["seal"])]
            ratio = f"{copy / plain:.2f}"
            table.add(name, f"{one['mib']:.0f}", *row[:2], ratio, *row[2:], f"{one['memory']:.2f}")
            table.show_last()
    save("checkpoints", {"rounds": rounds, "models": results})


if __name__ == "__main__":
    main()
