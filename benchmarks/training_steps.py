"""Timed training steps: one process with a given number of threads. Started by `benchmarks.training`.

    python -m benchmarks.training_steps ways MODEL_DIR --threads 1          packed beside padded, step by step in turn
    python -m benchmarks.training_steps micro-batches MODEL_DIR ...         dynamic beside fixed micro-batches
    python -m benchmarks.training_steps ceiling MODEL_DIR --dtype bfloat16  share of the machine's fastest product
    python -m benchmarks.training_steps records MODEL_DIR                   with and without a record of each token

The last line of standard output is one JSON object. Compared ways take their steps in turn, so that other
work on the machine disturbs all of them.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import cycle, islice, pairwise
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import torch

from benchmarks.flops import ceiling, step_flops
from benchmarks.lengths import GroupLengths, batch, load, tokens
from benchmarks.memory import forget_peak, peak_bytes, resident_bytes
from benchmarks.padded import PaddedTrainer
from stretto.core.records import Batch, Sampling
from stretto.model.hf.folder import load_policy
from stretto.model.packed.attention import PACKED_ATTENTION
from stretto.store.config import TokensConfig
from stretto.trainer.batch.minibatch import Minibatch, micro_batches, minibatch
from stretto.trainer.batch.samples import Sample
from stretto.trainer.config import TrainerConfig
from stretto.trainer.messages import TokensSpec
from stretto.trainer.objective.algorithm import AlgorithmConfig
from stretto.trainer.objective.corrections import CORRECTIONS
from stretto.trainer.objective.estimators import ESTIMATORS
from stretto.trainer.outcomes import TokenSink, TokenWriter
from stretto.trainer.trainer import Trainer

LONGEST = 144
ALGORITHM = AlgorithmConfig(advantages=ESTIMATORS("group_mean"), correction=CORRECTIONS("mask", high=5.0))
ROWS = (64, 16)  # of a padded forward

Step = Callable[[Batch], object]
T = TypeVar("T")


class DealtTrainer(Trainer):
    """Trainer that splits each minibatch into a fixed number of micro-batches, with rows in their order."""

    count = 1

    def _minibatches(self, rows: Sequence[Sample]) -> list[Minibatch]:
        config = self._config.model_copy(update={"micro_batch_tokens": 1 << 40})
        total = sum(len(row.loss_positions) for row in rows)
        parts = []
        for some in dealt(rows, self.count):
            part = minibatch(some, config, "token_mean", LONGEST, torch.device("cpu"))
            share = part.loss_tokens / total  # the mean is over the whole minibatch, not over this part
            parts += [replace(micro, scale=micro.scale * share) for micro in part.micro_batches]
        return [Minibatch(tuple(parts), total, tuple(row.id for row in rows), (tuple(rows),))]


def _trainer(
    kind: type[Trainer], model: Path, dtype: str, micro_batch_tokens: int, sink: TokenSink | None = None
) -> Trainer:
    config = TrainerConfig.model_validate(
        {"minibatches": 1, "dtype": dtype, "learning_rate": 1e-5, "micro_batch_tokens": micro_batch_tokens}
    )
    policy = load_policy(model, attention=PACKED_ATTENTION)
    return kind(policy, config, ALGORITHM, Sampling(max_tokens=LONGEST), sink=sink)


def packed(model: Path, dtype: str = "float32", micro_batch_tokens: int = 4096) -> Step:
    """stretto's own step, with everything that a step of a run does."""
    return _trainer(Trainer, model, dtype, micro_batch_tokens).train


def fixed(model: Path, count: int) -> Step:
    trainer = _trainer(DealtTrainer, model, "float32", 4096)
    assert isinstance(trainer, DealtTrainer)
    trainer.count = count
    return trainer.train


def recorded(model: Path, folder: Path) -> Step:
    """The same step, but it also records its tokens and writes the record before it ends. In a run, a thread writes it
    during the next step."""
    spec = TokensSpec(folder=str(folder), config=TokensConfig().model_dump_json())
    writer = TokenWriter(spec, rank=0)
    trainer = _trainer(Trainer, model, "float32", 4096, writer)

    def step(batch: Batch) -> None:
        trainer.train(batch)
        writer.finish()

    return step


def padded(model: Path, rows: int, *, by_length: bool = False) -> Step:
    config = TrainerConfig(minibatches=1, learning_rate=1e-5)
    return PaddedTrainer(load_policy(model), config, ALGORITHM, LONGEST, rows, by_length=by_length).train


def in_turn(
    ways: Mapping[str, Step], batches: Sequence[Batch], warm: int, clock: Callable[[], float] = time.perf_counter
) -> dict[str, list[float]]:
    """Seconds of each step of each way, after `warm` steps that do not count."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for number, one in enumerate(batches):
        for name, step in ways.items():
            began = clock()
            step(one)
            if number >= warm:
                seconds[name].append(clock() - began)
    return seconds


def rates(seconds: Mapping[str, Sequence[float]], measured: Sequence[Sequence[GroupLengths]]) -> dict[str, float]:
    """Trained tokens per second of each way."""
    trained = sum(map(tokens, measured))
    return {name: round(trained / sum(each), 1) for name, each in seconds.items()}


def compare(ways: Mapping[str, Step], model: Path, steps: int, warm: int) -> dict[str, Any]:
    lengths = load()[: warm + steps]
    vocabulary = json.loads((model / "config.json").read_text())["vocab_size"]
    batches = [batch(groups, vocabulary, version) for version, groups in enumerate(lengths)]
    seconds = in_turn(ways, batches, warm)
    return {
        "rates": rates(seconds, lengths[warm:]),
        "seconds": {n: [round(s, 5) for s in x] for n, x in seconds.items()},
    }


def ways(model: Path, steps: int, warm: int) -> dict[str, Any]:
    """Measure packed steps, steps padded in random order, and steps padded after sorting by length."""
    kinds: dict[str, Step] = {"packed": packed(model)}
    kinds |= {f"padded, {rows} rows": padded(model, rows) for rows in ROWS}
    kinds["padded, 16 rows by length"] = padded(model, 16, by_length=True)
    return compare(kinds, model, steps, warm)


def allocation(model: Path, capacity: int, steps: int, warm: int) -> dict[str, Any]:
    """Micro-batches of at most `capacity` tokens: as few as Algorithm 1 needs for each batch, or the smallest fixed
    number that suffices for every batch of the run."""
    lengths = load()
    rows = [[prompt + answer for prompt, answers in groups for answer in answers] for groups in lengths]
    count = fixed_count(rows, capacity)
    counts = [len(micro_batches(one, capacity)) for one in rows[warm : warm + steps]]
    found = compare(
        {"dynamic": packed(model, micro_batch_tokens=capacity), "fixed": fixed(model, count)}, model, steps, warm
    )
    return found | {"capacity": capacity, "fixed": count, "dynamic": round(sum(counts) / len(counts), 2)}


def fixed_count(rows: Sequence[Sequence[int]], capacity: int) -> int:
    """Smallest number of micro-batches such that none ever exceeds `capacity` tokens when rows are dealt out in
    order."""
    for count in range(1, max(map(len, rows)) + 1):
        if all(sum(part) <= capacity for one in rows for part in dealt(one, count)):
            return count
    raise ValueError(f"a sequence has more than {capacity} tokens")


def dealt(rows: Sequence[T], count: int) -> list[Sequence[T]]:
    """Split rows, in their order, into `count` parts whose sizes differ by at most one; fewer parts if there are fewer
    rows."""
    count = min(count, len(rows))
    edges = [len(rows) * k // count for k in range(count + 1)]
    return [rows[first:last] for first, last in pairwise(edges)]


def records(model: Path, steps: int, warm: int) -> dict[str, Any]:
    """Steps with and without recording the training status of every token.

    CPU time of all threads is measured, because the difference, a hundredth of a step, is less than other work on the
    machine adds to seconds. The run's batches are repeated.
    """
    lengths = list(islice(cycle(load()), warm + steps))
    vocabulary = json.loads((model / "config.json").read_text())["vocab_size"]
    batches = [batch(groups, vocabulary, version) for version, groups in enumerate(lengths)]
    with TemporaryDirectory() as folder:
        kinds = {"without": packed(model), "with": recorded(model, Path(folder))}
        seconds = in_turn(kinds, batches, warm, time.process_time)
        written = sum(path.stat().st_size for path in Path(folder).iterdir())
    trained = sum(map(tokens, lengths))
    return {
        "steps": steps,
        "processor_seconds": {name: round(median(each), 5) for name, each in seconds.items()},
        "cost": round(median(b / a - 1 for a, b in zip(seconds["without"], seconds["with"], strict=True)), 4),
        "bytes_per_token": round(written / trained, 2),
        "tokens_per_step": round(trained / len(lengths)),
    }


def utilisation(model: Path, dtype: str, steps: int, warm: int) -> dict[str, Any]:
    """Share of the fastest product's rate that a step reaches, and the memory that it needs."""
    most = ceiling(getattr(torch, dtype))
    trainer = _trainer(Trainer, model, dtype, 4096)
    vocabulary, lengths = trainer.learner.model.config.vocab_size, load()[: warm + steps]
    for version in range(warm):
        trainer.train(batch(lengths[version], vocabulary, version))
    gc.collect()
    before = resident_bytes()
    forget_peak()
    seconds, flops, trained, through = [], 0.0, 0, []
    for version, groups in enumerate(lengths[warm:], start=warm):
        one = batch(groups, vocabulary, version)
        began = time.perf_counter()
        trainer.train(one)
        seconds.append(time.perf_counter() - began)
        own = tokens(groups) + sum(prompt for prompt, _ in groups)
        sequences = [prompt + answer for prompt, answers in groups for answer in answers]
        flops += step_flops(trainer.learner.model, own, tokens(groups), sequences)
        trained += tokens(groups)
        through.append(own)
    return {
        "dtype": dtype,
        "threads": torch.get_num_threads(),
        "ceiling_gflops": round(most / 1e9, 1),
        "gflops": round(flops / sum(seconds) / 1e9, 1),
        "fraction": round(flops / sum(seconds) / most, 3),
        "tokens_per_second": round(trained / sum(seconds), 1),
        "bytes_per_token": round((peak_bytes() - before) / max(through)),
        "resident_mib": round(before / 2**20),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("ways", "micro-batches", "ceiling", "records"))
    parser.add_argument("model", type=Path)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--warm", type=int, default=2)
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--capacity", type=int, default=1024)
    words = parser.parse_args()
    torch.set_num_threads(words.threads)
    parts: dict[str, Callable[[], dict[str, Any]]] = {
        "ways": lambda: ways(words.model, words.steps, words.warm),
        "micro-batches": lambda: allocation(words.model, words.capacity, words.steps, words.warm),
        "records": lambda: records(words.model, words.steps, words.warm),
        "ceiling": lambda: utilisation(words.model, words.dtype, words.steps, words.warm),
    }
    print(json.dumps(parts[words.part]()))


if __name__ == "__main__":
    main()
