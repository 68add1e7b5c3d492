"""Measure the speed of this machine: decode steps, prefills, training steps and loads, for models of a few shapes.

On a CPU, process time is measured, so that other programs disturb it little; on a GPU, wall time. The models have
random weights.
"""

from __future__ import annotations

import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import torch

from stretto.core.errors import several
from stretto.core.machine import cores, processor
from stretto.core.records import (
    Batch,
    GenerateRequest,
    Group,
    Outcome,
    Prompt,
    Sampling,
    Segment,
    StopReason,
    Trajectory,
    Verdict,
)
from stretto.engine.config import EngineConfig
from stretto.engine.native.engine import NativeEngine
from stretto.model.hf.build import build_policy
from stretto.model.hf.config import BuildConfig
from stretto.model.hf.folder import load_policy
from stretto.model.hf.shape import ModelShape
from stretto.model.packed.attention import PACKED_ATTENTION
from stretto.trainer.config import TrainerConfig
from stretto.trainer.objective.algorithm import AlgorithmConfig
from stretto.trainer.trainer import Trainer
from stretto.weights.folder import remove, shared_folder
from stretto.weights.shared_memory import SharedMemoryPublisher, SharedMemorySubscriber
from stretto_foresight.planner.fit import (
    DecodeSample,
    LoadSample,
    PrefillSample,
    TrainSample,
    fit_decode,
    fit_loads,
    fit_prefill,
    fit_training,
)
from stretto_foresight.planner.lengths import LogNormalLengths
from stretto_foresight.planner.machine import MachineProfile

_ALPHABET = "0123456789+-=abcdefghijklmnopqr"
_PROMPT = 10
_ROWS = (1, 8, 32, 96)
_WINDOW, _WINDOWS = 12, 6  # steps of which the median is one sample, and number of samples
_COPIED = 1 << 26  # bytes that are summed to measure the memory bandwidth
_BATCHES = 4  # batches of each size; the first one warms up
_SPREAD = 0.6  # standard deviation of the logarithm of a completion's length
_RUN = "calibration"


def _shape(width: int, layers: int, context: int = 512) -> BuildConfig:
    return BuildConfig(
        family="qwen3",
        hidden_size=width,
        layers=layers,
        heads=max(1, width // 16) if width <= 64 else width // 32,
        kv_heads=max(1, width // 16) if width <= 64 else width // 64,
        head_dim=16 if width <= 64 else 32,
        intermediate_size=2 * width if width <= 64 else 3 * width,
        context_length=context,
        alphabet=_ALPHABET,
    )


ON_A_PROCESSOR = (_shape(64, 2), _shape(64, 4), _shape(128, 3), _shape(256, 4))
ON_A_GPU = (_shape(1024, 8, 4096), _shape(1024, 16, 4096), _shape(2048, 8, 4096))


@dataclass
class Measurements:
    """Timing samples of this machine, for models of several shapes, which `measure_shape` adds. `transfers`: seconds
    from the publication of a version until an engine could load it."""

    decodes: list[DecodeSample] = field(default_factory=list)
    prefills: list[PrefillSample] = field(default_factory=list)
    trainings: list[TrainSample] = field(default_factory=list)
    loads: list[LoadSample] = field(default_factory=list)
    transfers: list[float] = field(default_factory=list)


def calibrate(say: Callable[[str], None]) -> MachineProfile:
    """Measure this machine and return its fitted record. `say` gets a line after each model shape. Torch uses one
    thread meanwhile, in the whole process."""
    gpu = torch.cuda.is_available()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    found = Measurements()
    try:
        with tempfile.TemporaryDirectory(prefix="stretto-calibrate-") as folder:
            for number, config in enumerate(ON_A_GPU if gpu else ON_A_PROCESSOR):
                measure_shape(config, Path(folder) / str(number), found)
                say(f"measured: {several(config.layers, 'layer')} of width {config.hidden_size}")
        bandwidth = _bandwidth()
    finally:
        torch.set_num_threads(threads)
    return profile_of(found, bandwidth)


def profile_of(found: Measurements, bandwidth: float) -> MachineProfile:
    """Return a record of this machine fitted to the measurements, with its name, memory and cores. `bandwidth`: memory
    bandwidth in bytes per second."""
    gpu = torch.cuda.is_available()
    name = torch.cuda.get_device_name() if gpu else f"{processor()}, {several(cores(), 'core')}"
    memory = torch.cuda.mem_get_info()[1] if gpu else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    decode = fit_decode(found.decodes)
    fitted = {
        **decode,
        **fit_prefill(found.prefills, decode["layer_seconds"]),
        **fit_training(found.trainings),
        **fit_loads(found.loads),
    }
    facts: dict[str, object] = {
        "name": name,
        "memory_gib": memory / 2**30,
        "weight_bandwidth": bandwidth,
        "transfer_seconds": statistics.median(found.transfers),
        "cores": 0.0 if gpu else float(cores()),
        "sources": dict.fromkeys((*fitted, "weight_bandwidth", "transfer_seconds"), "stretto plan --calibrate"),
    }
    return msgspec.convert(facts | fitted, MachineProfile)


def measure_shape(config: BuildConfig, folder: Path, found: Measurements, rows: Sequence[int] = _ROWS) -> None:
    """Measure a model of this shape, and append the samples to `found`. The model is written to `folder`. `rows`:
    numbers of concurrent completions at which decode is measured."""
    build_policy(config, folder, seed=1)
    shape = _model_shape(config, folder)
    for count in rows:
        _measure_engine(shape, folder, count, found)
    _measure_trainer(shape, folder, found)


def _model_shape(config: BuildConfig, folder: Path) -> ModelShape:
    parameters = sum(parameter.numel() for parameter in load_policy(folder).parameters())
    kv_heads, vocabulary = config.kv_heads, len(config.vocabulary)
    shape = (config.layers, config.hidden_size, config.heads, kv_heads, config.head_dim, vocabulary)
    return ModelShape(parameters, *shape, tied=config.tie_embeddings)


def _now() -> float:
    """Return the process time in seconds; on a GPU the wall time, once its work is done."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        return time.monotonic()
    return time.process_time()


def _steps(engine: NativeEngine, count: int) -> Iterator[float]:
    for _ in range(count):
        began = _now()
        engine.step()
        yield _now() - began


def _measure_engine(shape: ModelShape, folder: Path, rows: int, found: Measurements) -> None:
    engine = NativeEngine.load(folder, EngineConfig(slots=rows))
    sampling = Sampling(max_tokens=_WINDOW * _WINDOWS + 60)
    chance = random.Random(rows)

    def ask(name: str, length: int, seeds: int) -> None:
        prompt = tuple(chance.randrange(2, shape.vocab_size) for _ in range(length))
        engine.add(GenerateRequest(name, prompt, tuple(range(seeds)), sampling))

    for number in range(rows):
        ask(str(number), _PROMPT, 1)
    list(_steps(engine, 4))  # prefills, and the slow first calls
    decode = 0.0
    for _ in range(_WINDOWS):
        cached = rows * _PROMPT + engine.health().unfinished
        decode = statistics.median(_steps(engine, _WINDOW))
        found.decodes.append(DecodeSample(shape, rows, cached + rows * _WINDOW / 2, decode))
    tensors = {name: parameter.detach().clone() for name, parameter in load_policy(folder).named_parameters()}
    for version in (1, 2, 3):
        began = _now()
        engine.update(version, tensors)
        seconds = _now() - began
        contexts = (_PROMPT + engine.health().unfinished // rows,) * rows
        (step,) = _steps(engine, 1)
        if version > 1 and sum(contexts) <= EngineConfig().max_prefill_tokens:
            found.loads.append(LoadSample(shape.parameters, max(seconds, 1e-6)))
            found.prefills.append(PrefillSample(shape, contexts, max(step - decode, 1e-6)))


def _measure_trainer(shape: ModelShape, folder: Path, found: Measurements) -> None:
    config, algorithm = TrainerConfig(minibatches=1, learning_rate=1e-6), AlgorithmConfig()
    trainer = Trainer(load_policy(folder, attention=PACKED_ATTENTION), config, algorithm, Sampling(max_tokens=512))
    run, version = f"{_RUN}.{os.getpid()}", 0
    place = shared_folder(4 * shape.parameters, folder)
    publisher, subscriber = SharedMemoryPublisher(run, place), SharedMemorySubscriber(run, place)
    try:
        for completions, length in ((16, 20), (64, 10), (64, 40), (64, 40), (128, 30), (128, 60)):
            for repeat in range(_BATCHES):
                batch = _batch(completions, length, shape.vocab_size, version)
                began = _now()
                trainer.train(batch)
                write = trainer.copied(publisher)
                copied = _now()
                write()
                version += 1
                subscriber.load(version)
                loadable = _now()
                if repeat:
                    sequences = _sequences(batch)
                    passes = -(-sum(sequences) // config.micro_batch_tokens)
                    found.trainings.append(TrainSample(shape, sequences, passes, copied - began))
                    found.transfers.append(loadable - copied)
    finally:
        remove(run, place)


def _batch(completions: int, length: int, vocabulary: int, version: int) -> Batch:
    """Make a batch of groups of eight completions with random tokens (ids below `vocabulary`), all sampled by
    `version`, `length` tokens on average. The lengths vary as a policy's do, because equal lengths would train
    faster."""
    chance, groups = random.Random(version), []
    lengths = LogNormalLengths(length, _SPREAD, 4 * length).groups(chance, 8)
    for number in range(completions // 8):
        prompt = Prompt(str(number), tuple(chance.randrange(2, vocabulary) for _ in range(_PROMPT)), "", "")
        trajectories = [
            Trajectory(f"{number}/{member}", (_segment(chance, drawn, vocabulary, version),), _verdict(member), "")
            for member, drawn in enumerate(next(lengths))
        ]
        groups.append(Group(str(number), prompt, version, tuple(trajectories)))
    return Batch(version + 1, version, tuple(groups))


def _sequences(batch: Batch) -> tuple[int, ...]:
    return tuple(
        len(group.prompt.token_ids) + one.segments[0].length for group in batch.groups for one in group.trajectories
    )


def _segment(chance: random.Random, length: int, vocabulary: int, version: int) -> Segment:
    tokens = tuple(chance.randrange(2, vocabulary) for _ in range(length))
    return Segment.of(tokens, (-3.0,) * length, (version,) * length, stop_reason=StopReason.STOP)


def _verdict(member: int) -> Verdict:
    return Verdict(outcome=Outcome.RIGHT if member % 2 else Outcome.WRONG, reward=float(member % 2))


def _bandwidth() -> float:
    """Measure the memory read bandwidth of one thread, or of the GPU, in bytes per second."""
    numbers = torch.ones(_COPIED // 4, device="cuda" if torch.cuda.is_available() else "cpu")
    float(numbers.sum())
    seconds = []
    for _ in range(5):
        began = _now()
        float(numbers.sum())
        seconds.append(_now() - began)
    return _COPIED / max(min(seconds), 1e-9)
