"""Sampling requests: queues of waiting ones, and engines, one for each set of weights, that compute them."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from stretto.core.errors import RefusedRequest, StoreError, StrettoError
from stretto.core.records import derive_seed
from stretto_tinker.compute.base import LocalBackend
from stretto_tinker.compute.sampler import Sampler, Wish
from stretto_tinker.record import Asked
from stretto_tinker.wire.bodies import Sample, TargetIds
from stretto_tinker.wire.outputs import Sampled, encode_sampled
from stretto_tinker.work import turns

_UNBOUNDED = 1 << 62
_FEWEST_IDLE = 3
_MOST_SAMPLES = 1024
_MOST_WIDTH = 1024


class Lane(NamedTuple):
    """Key of an engine: path of its weights ("" for the base model), and the client that has it alone ("" for the
    engine that clients share)."""

    weights: str
    owner: str = ""


_BASE = Lane("")


class Seeded(msgspec.Struct, frozen=True):
    """A request for samples as it is recorded, with a seed, so that a repeated computation gives the same tokens.

    `seed`: that of the request modulo 2**62, or, if it has none, one drawn when the request was accepted. `weights`:
    their path, None for the base model.
    """

    sample: Sample
    seed: int
    weights: str | None


class Waiting(msgspec.Struct, frozen=True):
    """A queued request for samples, without its body, which is only in the record. `tokens`: most tokens of its longest
    sequence, prompt included."""

    asked: Asked
    sequences: int
    tokens: int


def waiting(asked: Asked) -> tuple[str, Waiting]:
    """Make the queue entry of a request for samples, which must have its body; returns the path of its weights ("" for
    the base model), and the entry."""
    seeded = msgspec.json.decode(asked.body or b"", type=Seeded)
    prompt, most = seeded.sample.prompt.token_ids(), seeded.sample.sampling_params.max_tokens
    tokens = _UNBOUNDED if most is None else len(prompt) + max(0, most)
    return seeded.weights or "", Waiting(replace(asked, body=None), seeded.sample.num_samples, tokens)


class Engines:
    """Engines in memory, by their lane. They share one budget of KV cache, and one of memory for weights
    (`samplers_bytes` of the backend), in which the base model's weights do not count.

    Making an engine takes longer than a small sample. So once three engines, not counting the base model's, are idle,
    the least recently used one gives up its lane: new adapters go into it if it has adapters with equal settings, else
    it is removed and an engine made.
    """

    def __init__(self, backend: LocalBackend) -> None:
        self._backend = backend
        self._engines: OrderedDict[Lane, Sampler] = OrderedDict()  # the most recently used last
        self._sizes: dict[Lane, int] = {}  # bytes of their weights
        self._wanted: dict[Path, int] = {}  # the same of weights that wait for an engine

    def has_room(self, lane: Lane, folder: Path | None) -> bool:
        """Whether the engine of a lane is in memory, or has room once idle ones are removed; nothing is removed now. If
        none is busy, there is room for any engine, however large. `folder`: its weights; None: the base model, which
        always has room."""
        if lane in self._engines or folder is None:
            return True
        busy = [self._sizes[one] for one, engine in self._engines.items() if one != _BASE and not engine.idle]
        return not busy or sum(busy) + self._size(folder) <= self._backend.samplers_bytes

    def _size(self, folder: Path) -> int:
        """Bytes of memory of the weights in `folder`; 0 if they are missing or damaged."""
        if folder not in self._wanted:
            try:
                self._wanted[folder] = self._backend.memory_of_sampler(folder)
            except StoreError:  # which making the engine will tell
                self._wanted[folder] = 0
        return self._wanted[folder]

    def of(self, lane: Lane, folder: Path | None) -> Sampler:
        """Return the engine of a lane. If none is in memory, one is made, or an idle one gets the weights; other idle
        ones are removed if memory is short. `folder`: its weights, None for the base model.

        Raises:
            StoreError: files of the weights are missing or damaged.
        """
        if lane not in self._engines:
            size = 0 if folder is None else self._size(folder)
            self._wanted.clear()  # what is saved under a name may change
            engine = self._reused(folder)
            self._remove_idle(self._backend.samplers_bytes - size)
            self._engines[lane] = engine or self._backend.sampled(folder)
            self._sizes[lane] = size
        self._engines.move_to_end(lane)
        return self._engines[lane]

    def _remove_idle(self, most: int) -> None:
        """Remove the least recently used idle engines, but not the base model's, while the weights of all are larger
        than `most` bytes."""
        for lane in [lane for lane, engine in self._engines.items() if engine.idle and lane != _BASE]:
            if self.weights <= most:
                break
            self._remove(lane)

    def _remove(self, lane: Lane) -> Sampler:
        del self._sizes[lane]
        return self._engines.pop(lane)

    def _reused(self, folder: Path | None) -> Sampler | None:
        """Take the least recently used idle engine out and give it the weights in `folder`, if at least three are idle.
        None if fewer are idle, or `folder` is None (the base model); None also if these weights have another shape than
        the engine's, which is then removed."""
        idle = [lane for lane, engine in self._engines.items() if engine.idle and lane.weights]
        if len(idle) < _FEWEST_IDLE or folder is None:
            return None
        engine = self._remove(idle[0])
        return engine if engine.take(folder) else None

    def make_room(self, chosen: Sampler) -> None:
        """Give an engine its share of the KV cache, at least what its longest open sequence needs, by its `limit`. If
        there is not enough room, the limits of other engines are reduced: idle ones to 0, then working ones, least
        recently used first, to the same share, then to 0."""
        others = [engine for engine in self._engines.values() if engine is not chosen]
        for lane in [lane for lane, engine in self._engines.items() if engine is chosen]:
            self._engines.move_to_end(lane)
        working = [engine for engine in others if not engine.idle]
        share = self._backend.cache_bytes // (1 + len(working))
        own = max(share, chosen.least_cache)
        steps = [(engine, 0) for engine in others if engine.idle]
        steps += [(engine, share) for engine in working] + [(engine, 0) for engine in working]
        for engine, limit in steps:
            if own + sum(other.cache for other in others) <= self._backend.cache_bytes:
                break
            if engine.cache > limit:
                engine.limit(limit)
        chosen.limit(own)

    @property
    def weights(self) -> int:
        """Bytes of the weights of all engines, without those of the base model."""
        return sum(self._sizes.values())

    def trim(self) -> None:
        """Remove idle engines from memory, except the three most recently used and that of the base model."""
        idle = [lane for lane, engine in self._engines.items() if engine.idle and lane != _BASE]
        for lane in idle[: max(0, len(idle) - _FEWEST_IDLE)]:
            self._remove(lane)

    def discard(self, failed: Sampler) -> None:
        """Remove an engine that has failed, under whatever lane: its weights may have been replaced meanwhile."""
        for lane in [lane for lane, engine in self._engines.items() if engine is failed]:
            self._remove(lane)

    def drop(self, weights: str) -> None:
        """Detach the engines from a path of weights, so that its next request gets a new engine. The detached ones
        finish their open requests, and are the first to be reused or removed."""
        self._wanted.clear()
        for lane in [lane for lane in self._engines if lane.weights == weights]:
            size, engine = self._sizes[lane], self._remove(lane)
            gone = Lane(f"{weights} ({id(engine)}, gone)", lane.owner)
            self._engines[gone], self._sizes[gone] = engine, size
            self._engines.move_to_end(gone, last=False)


class SampleQueue:
    """Queued requests for samples from one set of weights, in a queue for each client."""

    def __init__(self) -> None:
        self._queues: dict[str, deque[Waiting]] = {}

    def add(self, waiting: Waiting, *, first: bool = False) -> None:
        """Append a request to the queue of its client; with `first`, put it before the others."""
        queue = self._queues.setdefault(waiting.asked.owner, deque())
        (queue.appendleft if first else queue.append)(waiting)

    def first(self, owner: str) -> Waiting:
        """First request in the queue of a client, which must have one; it stays there."""
        return self._queues[owner][0]

    def next(self, open: Mapping[str, int], owners: Collection[str]) -> Waiting | None:
        """First request of the client among `owners` that has the fewest open requests; it stays in the queue. None if
        none of them has a queued request. `open`: number of open requests by client; 0 if it is not in it."""
        waiting = [owner for owner in self._queues if owner in owners]
        return self.first(min(waiting, key=lambda owner: open.get(owner, 0))) if waiting else None

    def remove(self, waiting: Waiting) -> None:
        """Remove `waiting`, which must be the first request of its client. The client then comes after others with as
        few open requests."""
        queue = self._queues.pop(waiting.asked.owner)
        assert queue.popleft() is waiting
        if queue:
            self._queues[waiting.asked.owner] = queue

    def discard(self, chosen: Callable[[Asked], bool]) -> list[Asked]:
        """Remove the requests for which `chosen` returns True; returns them."""
        found = [one.asked for queue in self._queues.values() for one in queue if chosen(one.asked)]
        for owner in {asked.owner for asked in found}:
            kept = deque(one for one in self._queues[owner] if not chosen(one.asked))
            if kept:
                self._queues[owner] = kept
            else:
                del self._queues[owner]
        return found

    @property
    def owners(self) -> list[str]:
        """Clients with queued requests."""
        return list(self._queues)


class Sampling:
    """The requests that one engine is sampling (open requests): begins them, and gathers their results."""

    def __init__(self, engine: Sampler) -> None:
        self.engine = engine
        self._open: dict[str, Asked] = {}
        self._sequences: dict[str, int] = {}  # number of sequences by open request

    @property
    def owners(self) -> list[str]:
        """Client of each open request; a client appears once per request."""
        return [asked.owner for asked in self._open.values()]

    def begins(self, waiting: Waiting) -> bool:
        """Whether a request can begin on this engine now; always, if no request is open. Otherwise it needs a free slot
        and a short backlog, also of its client's prompts to score. If its client has less than an equal share of the
        open sequences, it also needs KV cache up to its end, so that it does not have to wait for the sequences of
        others."""
        if self.idle:
            return True
        if self.engine.free <= 0 or self.engine.backlog >= turns.TURN_TOKENS // 2 or self._behind(waiting.asked.owner):
            return False
        return not self.owes(waiting.asked.owner) or self.engine.fits(waiting.sequences, waiting.tokens)

    def owes(self, owner: str) -> bool:
        """Whether a client has fewer open sequences on this engine than an equal share of all, and does not wait for
        its own prompts to be scored."""
        clients = {owner, *self.owners}
        own = sum(self._sequences[id] for id, asked in self._open.items() if asked.owner == owner)
        return own * len(clients) < sum(self._sequences.values()) and not self._behind(owner)

    def _behind(self, owner: str) -> bool:
        """Whether so many tokens of a client's open prompts are not scored yet that it begins no further request."""
        return self.engine.unscored(owner) >= turns.TURN_TOKENS // 2

    @property
    def idle(self) -> bool:
        """Whether no request is open."""
        return not self._open

    def begin(self, asked: Asked) -> None:
        """Open a request, which must have its body, and add it to the engine.

        Raises:
            RefusedRequest: names the wrong field.
        """
        seeded = msgspec.json.decode(asked.body or b"", type=Seeded)
        sample, prompt = seeded.sample, seeded.sample.prompt.token_ids()
        check_sample(sample, prompt)
        targets, last = sample.target_prompt_logprobs, sample.prompt_logprobs_last_n
        wish = Wish(
            prompt,
            tuple(derive_seed(seeded.seed, member) for member in range(sample.num_samples)),
            sample.sampling_params,
            likeliest=sample.topk_sample_logprobs,
            owner=asked.owner,
            scored=bool(sample.prompt_logprobs),
            prompt_likeliest=sample.topk_prompt_logprobs,
            first=1 if last is None else len(prompt) - last,
            targets=None if targets is None else dense_targets(targets, len(prompt)),
            drawn=sample.prompt_alt_tokens_k,
            seed=seeded.seed,
        )
        self.engine.add(asked.id, wish)
        self._open[asked.id], self._sequences[asked.id] = replace(asked, body=None), sample.num_samples

    def turn(self, over: Callable[[], bool]) -> Iterator[tuple[Asked, bytes | StrettoError]]:
        """Take steps of the engine until `over()`, asked after each step, is true or no request is open. A step samples
        one token of each sequence that has a slot; sequences that wait for a slot get none. Yields each request that
        ends, with its encoded result or its error. Iterate to the end: requests that ended in a step are closed only
        when they are yielded."""
        last = self.engine.idle
        while not last:
            found = self.engine.step()
            last = over() or self.engine.idle
            for id, ended in found.items():
                yield self._end(id), ended if isinstance(ended, StrettoError) else _encoded(ended)

    def _end(self, id: str) -> Asked:
        del self._sequences[id]
        return self._open.pop(id)

    def abort(self, id: str) -> Asked | None:
        """Abort an open request and return it; None if it is not open."""
        if id not in self._open:
            return None
        self.engine.abort(id)
        return self._end(id)

    def open(self) -> list[Asked]:
        """Open requests, without their bodies."""
        return list(self._open.values())


def lane_of(weights: str, first: Waiting, samplings: Mapping[Lane, Sampling]) -> Lane | None:
    """Lane of the engine on which `first`, the next request of a client for samples by `weights`, can begin now: the
    shared engine if it has room, else, if the client has less than its share there, one that it has alone. None if it
    has to wait. `samplings`: engines that have open requests."""
    owner, shared = first.asked.owner, samplings.get(Lane(weights))
    if shared is None or shared.begins(first):
        return Lane(weights)
    if not shared.owes(owner):
        return None
    own = samplings.get(Lane(weights, owner))
    return Lane(weights, owner) if own is None or own.begins(first) else None


def beginning(
    queues: Mapping[str, SampleQueue], samplings: Mapping[Lane, Sampling], has_room: Callable[[Lane], bool]
) -> dict[Lane, list[str]]:
    """Engines on which the next requests may begin now, each with the clients of these requests. An engine that a
    client would have alone needs room, by `has_room`; a shared one is named without room as well. `queues`: by path of
    weights. `samplings`: engines that have open requests."""
    found: dict[Lane, list[str]] = {}
    for weights, queue in queues.items():
        for owner in queue.owners:
            lane = lane_of(weights, queue.first(owner), samplings)
            if lane is not None and (not lane.owner or has_room(lane)):
                found.setdefault(lane, []).append(owner)
    return found


def _encoded(sampled: Sampled) -> bytes | StrettoError:
    """Encode a result; returns the request's error if the result is too large or cannot be encoded."""
    try:
        return encode_sampled(sampled)
    except (ValueError, MemoryError) as error:  # protobuf's limit is 2 GiB
        return StrettoError(f"the result is too large: {error}")
    except Exception as error:  # the request is open no more, so that nobody but the caller can fail it
        return StrettoError(f"the result cannot be encoded: {type(error).__name__}: {error}")


def check_sample(sample: Sample, prompt: tuple[int, ...]) -> None:
    """Check the settings of a request for samples; the engine checks the others. `prompt`: token ids.

    Raises:
        RefusedRequest: names the first field that is wrong or not served.
    """
    settings = sample.sampling_params
    bounds: dict[str, tuple[float, float, float]] = {
        "num_samples": (sample.num_samples, 1, _MOST_SAMPLES),
        "topk_sample_logprobs": (sample.topk_sample_logprobs, 0, _MOST_WIDTH),
        "topk_prompt_logprobs": (sample.topk_prompt_logprobs, 0, _MOST_WIDTH),
        "prompt_alt_tokens_k": (sample.prompt_alt_tokens_k, 0, _MOST_WIDTH),
        "sampling_params.temperature": (settings.temperature, 0, 100),
        "sampling_params.top_p": (settings.top_p, 1e-9, 1),
        "sampling_params.top_k": (settings.top_k, -1, 2**31),
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
    """Convert the requested target tokens to a dense array [P - 1, K], as lists, one row for each position of a prompt
    after the first; -1 marks an empty entry. `prompt`: number of the prompt's tokens, P.

    Raises:
        RefusedRequest: the array does not fit the prompt, or its indices are inconsistent.
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
    whole = len(rows) == shape[0] + 1 and rows[0] == 0 and rows[-1] == len(targets.data) == len(columns)
    if not whole:
        raise RefusedRequest(field, "indices that do not fit together", "rows and columns in order")
    if any(a > b for a, b in pairwise(rows)) or not all(0 <= c < shape[1] for c in columns):
        raise RefusedRequest(field, "indices out of order or out of range", f"columns 0 to {shape[1] - 1}")
    dense[np.repeat(np.arange(shape[0]), np.diff(rows)), columns] = targets.data
    return dense.tolist()  # type: ignore[no-any-return]
