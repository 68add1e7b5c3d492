"""Sampling: one engine for each set of weights, and requests that end when all of their sequences have."""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from stretto.core.errors import RefusedRequest, StrettoError
from stretto.core.records import derive_seed
from stretto_tinker.compute.backend import Backend, SampledModel, Wish
from stretto_tinker.record.record import Asked
from stretto_tinker.wire.bodies import Sample, TargetIds
from stretto_tinker.wire.outputs import Floats, Likeliest, Sampled, encode_sampled

TURN_SECONDS = 0.05
_FEWEST_IDLE = 3
_MOST_SAMPLES = 1024
_MOST_WIDTH = 1024


class Seeded(msgspec.Struct, frozen=True):
    """A request for samples as it is put on record: its seed is drawn when it is accepted, so that it gives the same
    tokens when it is computed again."""

    sample: Sample
    seed: int
    weights: str | None  # path of the weights, None for those of the base model


class Engines:
    """The sampled models in memory. To make one takes longer than a small sample: so the one that was not used for
    longest takes over new weights of its shape, once there are some."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._engines: OrderedDict[str, SampledModel] = OrderedDict()

    def of(self, name: str, folder: Path | None) -> SampledModel:
        """The engine of some weights.

        Raises:
            StoreError: they are not whole.
        """
        if name not in self._engines:
            self._engines[name] = self._reused(folder) or self._backend.sampled(folder)
        self._engines.move_to_end(name)
        return self._engines[name]

    def _reused(self, folder: Path | None) -> SampledModel | None:
        idle = [name for name, engine in self._engines.items() if engine.idle and name]
        if len(idle) < _FEWEST_IDLE or folder is None:
            return None
        engine = self._engines.pop(idle[0])
        return engine if engine.take(folder) else None

    def trim(self) -> None:
        """Forget idle engines, each of which holds a KV cache, but for those used last and that of the base model."""
        idle = [name for name, engine in self._engines.items() if engine.idle and name]
        for name in idle[: max(0, len(idle) - _FEWEST_IDLE)]:
            del self._engines[name]

    def discard(self, name: str) -> None:
        """Forget an engine that has failed."""
        self._engines.pop(name, None)

    def drop(self, name: str) -> None:
        """Forget the engine of some weights."""
        if name in self._engines and not self._engines[name].idle:
            del self._engines[name]
        elif name in self._engines:  # its weights are gone; its place is the first that is taken
            self._engines[f"{name} (gone)"] = self._engines.pop(name)
            self._engines.move_to_end(f"{name} (gone)", last=False)


class SampleQueue:
    """Requests for samples of one set of weights that wait, in a queue for each client."""

    def __init__(self) -> None:
        self._queues: dict[str, deque[Asked]] = {}

    def add(self, asked: Asked) -> None:
        """Put a request behind those of its client."""
        self._queues.setdefault(asked.owner, deque()).append(asked)

    def next(self, open: Mapping[str, int]) -> Asked | None:
        """The first request of the client that has the fewest of `open`; None where nobody waits."""
        owner = min(self._queues, key=lambda owner: open.get(owner, 0), default=None)
        return None if owner is None else self._queues[owner][0]

    def remove(self, asked: Asked) -> None:
        """Take a request away; its client is asked behind the others next time."""
        waiting = self._queues.pop(asked.owner)
        waiting.remove(asked)
        if waiting:
            self._queues[asked.owner] = waiting

    def __iter__(self) -> Iterator[Asked]:
        return iter([asked for waiting in self._queues.values() for asked in waiting])

    @property
    def owners(self) -> list[str]:
        """The clients that wait."""
        return list(self._queues)


class Sampling:
    """The open requests of one set of weights."""

    def __init__(self, engine: SampledModel) -> None:
        self.engine = engine
        self._open: dict[str, tuple[Asked, Sampled]] = {}

    @property
    def owners(self) -> list[str]:
        """The clients it works for, each as often as it has a request open."""
        return [asked.owner for asked, _ in self._open.values()]

    @property
    def room(self) -> bool:
        """Whether another request could be sampled beside the open ones."""
        return self.idle or self.engine.free > 0

    @property
    def idle(self) -> bool:
        """Whether nothing is open."""
        return not self._open

    def begin(self, asked: Asked) -> None:
        """Begin with a request: the prompt is scored, where that is wanted, and the sampling begins.

        Raises:
            RefusedRequest: with the field that is wrong.
        """
        seeded = msgspec.json.decode(asked.body or b"", type=Seeded)
        sample, prompt = seeded.sample, seeded.sample.prompt.token_ids()
        check_sample(sample, prompt)
        seeds = tuple(derive_seed(seeded.seed, member) for member in range(sample.num_samples))
        wish = Wish(prompt, seeds, sample.sampling_params, sample.topk_sample_logprobs)
        self.engine.add(asked.id, wish)
        try:
            self._open[asked.id] = (asked, self._of_prompt(sample, prompt, seeded.seed))
        except BaseException:
            self.engine.abort(asked.id)
            raise

    def _of_prompt(self, sample: Sample, prompt: tuple[int, ...], seed: int) -> Sampled:
        """What is wanted of the prompt itself."""
        logprobs: Floats | None = None
        likeliest: Likeliest | None = None
        first = 1 if sample.prompt_logprobs_last_n is None else len(prompt) - sample.prompt_logprobs_last_n
        if sample.prompt_logprobs:
            logprobs = self.engine.score(prompt, first)
        if sample.topk_prompt_logprobs:
            likeliest = self.engine.likeliest(prompt, first, sample.topk_prompt_logprobs)
        targets = None
        if sample.target_prompt_logprobs is not None:
            targets = self.engine.score_targets(prompt, dense_targets(sample.target_prompt_logprobs, len(prompt)))
        drawn = None
        if sample.prompt_alt_tokens_k:
            drawn = self.engine.draw(prompt, sample.prompt_alt_tokens_k, sample.sampling_params, seed)
        return Sampled([], logprobs, likeliest, targets, drawn)

    def turn(self, until: float) -> Iterator[tuple[Asked, bytes | StrettoError]]:
        """Sample a token at least of each sequence, and more until a time; the requests that ended, with their results,
        or why they have none."""
        while not self.engine.idle:
            for id, ended in self.engine.step().items():
                asked, sampled = self._open.pop(id)
                yield asked, ended if isinstance(ended, StrettoError) else _encoded(sampled, ended)
            if time.monotonic() > until:
                return

    def abort(self, id: str) -> Asked | None:
        """End a request; None if it is not open."""
        found = self._open.pop(id, None)
        if found is None:
            return None
        self.engine.abort(id)
        return found[0]

    def open(self) -> list[Asked]:
        """The open requests."""
        return [asked for asked, _ in self._open.values()]


def _encoded(sampled: Sampled, sequences: Any) -> bytes | StrettoError:
    of = (sampled.prompt_logprobs, sampled.prompt_likeliest, sampled.target_logprobs, sampled.drawn)
    try:
        return encode_sampled(Sampled(sequences, *of))
    except (ValueError, MemoryError) as error:  # protobuf's limit is 2 GiB
        return StrettoError(f"the result is too large: {error}")


def check_sample(sample: Sample, prompt: tuple[int, ...]) -> None:
    """Refuse what is not served, before anything is computed.

    Raises:
        RefusedRequest: with the first field that is wrong.
    """
    settings = sample.sampling_params
    bounds: dict[str, tuple[float, float, float]] = {
        "num_samples": (sample.num_samples, 1, _MOST_SAMPLES),
        "topk_sample_logprobs": (sample.topk_sample_logprobs, 0, _MOST_WIDTH),
        "topk_prompt_logprobs": (sample.topk_prompt_logprobs, 0, _MOST_WIDTH),
        "prompt_alt_tokens_k": (sample.prompt_alt_tokens_k, 0, _MOST_WIDTH),
        "sampling_params.temperature": (settings.temperature, 0, 100),
        "sampling_params.top_p": (settings.top_p, 1e-9, 1),
    }
    for field, (value, low, high) in bounds.items():
        if not low <= value <= high:
            raise RefusedRequest(field, str(value), f"{low:g} to {high:g}")
    last = sample.prompt_logprobs_last_n
    if last is not None and not (sample.prompt_logprobs and 1 <= last <= len(prompt) - 1):
        raise RefusedRequest("prompt_logprobs_last_n", str(last), f"1 to {len(prompt) - 1}, with prompt_logprobs")
    if sample.record_stability_info:
        told = "is not served: StableReinforce reads what the sampler of its makers records"
        raise RefusedRequest("record_stability_info", told, "false")


def dense_targets(targets: TargetIds, prompt: int) -> list[list[int]]:
    """The wanted tokens, a row for each position of a prompt after the first; -1 for none.

    Raises:
        RefusedRequest: the rows do not fit the prompt.
    """
    field, shape = "target_prompt_logprobs", targets.shape or []
    if wrong := [token for token in targets.data if not 0 <= token < 2**31]:
        raise RefusedRequest(field, f"token {wrong[0]}", "tokens of the vocabulary")
    if len(shape) != 2 or shape[0] != prompt - 1 or not 1 <= shape[1] <= _MOST_WIDTH:
        raise RefusedRequest(field, f"the shape {shape}", f"[{prompt - 1}, K] with K of 1 to {_MOST_WIDTH}")
    if targets.sparse_crow_indices is None:
        if len(targets.data) != shape[0] * shape[1]:
            raise RefusedRequest(field, f"{len(targets.data)} numbers", f"{shape[0] * shape[1]}")
        return np.asarray(targets.data, np.int64).reshape(shape).tolist()  # type: ignore[no-any-return]
    rows, columns = targets.sparse_crow_indices, targets.sparse_col_indices or []
    dense = np.full(shape, -1, np.int64)
    if len(rows) != shape[0] + 1 or rows[-1] != len(targets.data) or len(columns) != len(targets.data):
        raise RefusedRequest(field, "indices that do not fit together", "rows and columns in order")
    if any(a > b for a, b in pairwise(rows)) or not all(0 <= c < shape[1] for c in columns):
        raise RefusedRequest(field, "indices out of order or out of range", f"columns 0 to {shape[1] - 1}")
    dense[np.repeat(np.arange(shape[0]), np.diff(rows)), columns] = targets.data
    return dense.tolist()  # type: ignore[no-any-return]
