"""Interface of a make of inference server (vLLM, SGLang), and loading of its class by `engine.kind`. Each make has a
class that implements it, in a file of its own.

`engine.kind` names the class, a built-in (`MAKES` in `engine.config`) or a user's. Beside the methods of `Make` the
class needs an attribute `capabilities`, an `engine.config.Capabilities`, and a static method ``launch(config,
model, port)``, which returns the `Launch` that starts a server.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import math
import random
import secrets
import sys
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import msgspec

from stretto.core.canary import DECODED, LENGTH, Scores
from stretto.core.errors import WireError
from stretto.core.records import Likeliest, Record, Sampling
from stretto.engine.config import MAKES, Capabilities, EngineConfig
from stretto_servers.http import JsonServer

#: No sampled token has a smaller log-probability: vLLM writes -9999 for a filtered token, and for one without any.
NO_PROBABILITY = -9000.0


class Delta(Record, frozen=True):
    """Next tokens of a completion, with their log-probabilities (nats) under the distribution sampled from.

    `top_logprobs`: likeliest tokens at each position, if requested. `ended`: why the completion ended (``"stop"``,
    ``"length"``, ``"abort"``), "" while more tokens come. `spans`: weight versions ``(version, start, end)`` of all
    tokens of the request, if the server reports them.
    """

    token_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    top_logprobs: tuple[Likeliest, ...] = ()
    ended: str = ""
    spans: tuple[tuple[str, int, int], ...] = ()


def new_mark() -> str:
    """Make the ending of all names of versions that an adapter gives to its server. So an adapter of another run, which
    has loaded its own version of the same number into the same server, is noticed."""
    return f"-{secrets.token_hex(4)}"


def with_own_versions(delta: Delta, mark: str) -> Delta:
    """Remove the adapter's `mark` from the version names in the spans of `delta`. A bare number was set by somebody
    else, so it is renamed to a text that counts as no version. With the mark "" (nothing loaded yet), names stay."""
    if not delta.spans:
        return delta
    return msgspec.structs.replace(delta, spans=tuple((_own(name, mark), *places) for name, *places in delta.spans))


def _own(name: str, mark: str) -> str:
    if name.endswith(mark):
        return name.removesuffix(mark)
    return f"{name} of others" if name.isdecimal() else name


@dataclass(frozen=True)
class Continuation:
    """Request to generate the rest of one completion. `id`: unique for the server. `token_ids`: prompt and completion
    so far. `max_tokens`: limit of the rest, in place of that of `sampling`. `top_logprobs`: number of likeliest tokens
    to report for each position."""

    id: str
    token_ids: Sequence[int]
    sampling: Sampling
    max_tokens: int
    seed: int
    top_logprobs: int = 0


@dataclass(frozen=True)
class Served:
    """Description of a server: `release` as ``"vLLM 0.32"``, path or name of its model, context length in tokens, and
    model architecture. The last two are None if the server does not report them."""

    release: str
    model: str
    context_length: int | None
    architecture: str | None = None


@dataclass(frozen=True)
class Occupancy:
    """Load of a server: number of running and of waiting requests, used share of its KV cache (0 to 1), and number of
    preemptions since its start."""

    running: int
    waiting: int
    cache: float
    preempted: int = 0

    @property
    def needed(self) -> float:
        """Estimate of the KV cache that all requests need, waiting ones included, relative to its size."""
        return self.cache * (self.running + self.waiting) / max(1, self.running)


@dataclass(frozen=True)
class Limits:
    """Limits of the server: vocabulary size, context length in tokens, and number of concurrent completions.
    `connections`: most requests to the server at once, each of which needs a descriptor of this process."""

    vocab_size: int
    context_length: int
    slots: float = math.inf
    connections: int = sys.maxsize


class Make(Protocol):
    """Client of one server (Protocol). Each method that asks the server has its own deadline, and raises EngineLost if
    the server does not answer; only `ready` returns False then.

    Arguments of the class: a `stretto_servers.http.JsonServer`, and the longest wait for a load, in seconds.
    """

    def stream(self, continuation: Continuation) -> AsyncGenerator[Delta]:
        """Generate a completion; yields new tokens as they come. Leaving the iteration aborts it on the server.

        Raises:
            RefusedRequest: the server refuses the request.
            WireError: a reply differs from the documentation of this make.
        """

    async def ready(self) -> bool:
        """Whether the server accepts requests now; False if it does not answer."""

    async def describe(self) -> Served:
        """Ask the server for its release and model.

        Raises:
            WireError: the server lacks an endpoint that stretto needs; the error names the release that has it.
        """

    async def occupancy(self) -> Occupancy:
        """Ask the server for its current load.

        Raises:
            WireError: the server does not report it.
        """

    async def pause(self, *, keep: bool) -> None:
        """Stop all sampling until `resume`. With `keep`, running requests and their KV cache stay. Otherwise running
        requests end with "abort", and the server's caches are cleared."""

    async def load(self, folder: Path, version: int, *, keep: bool) -> None:
        """Load the safetensors files of a folder as `version`, while the server is paused. With `keep` the KV cache
        stays. The time limit restarts whenever `read` grows."""

    async def resume(self) -> None:
        """Resume sampling with the loaded weights."""

    async def score(self, token_ids: Sequence[int]) -> tuple[float, ...]:
        """Score a text: log-probabilities of all its tokens but the first, at temperature 1 without filters. The server
        must not be paused.

        Raises:
            WireError: a reply differs from the documentation of this make.
        """

    async def held(self, folder: Path, shapes: Mapping[str, Sequence[int]]) -> Sequence[Mapping[str, str]]:
        """Checksums of the tensors in each worker's memory, as text by name (`worker.readback.held`); empty if the
        server does not support it. `folder`: the last one loaded from. `shapes`: shapes of the published tensors."""

    @property
    def read(self) -> int:
        """Number of bytes that the server has read from the folder of the last load, as far as known; grows during a
        load."""

    async def close(self) -> None:
        """Close the connections to the server, which goes on."""


_CACHED_TOKENS = 288  # more than two of the largest KV cache blocks that servers use by default


async def canary_scores(make: Make, text: Sequence[int], name: str, seed: int, context: int, *, keep: bool) -> Scores:
    """Run a canary challenge on a server: it continues a prompt that fills several KV cache blocks, and then scores
    prompt and continuation at once. Stale KV entries of earlier weights show as differences between the two.

    Args:
        make: client of the server.
        text: token ids of the canary, which are repeated to make the prompt. With `keep`, KV entries of earlier weights
            are allowed; so the prompt begins with random tokens (seeded by `name`), for which there are no entries.
        name: a unique name for the request.
        seed: of the continuation.
        context: context length of the server, in tokens.

    Returns:
        Scores of `text`, and pairs of log-probabilities (as sampled, as scored) of the continuation.

    Raises:
        WireError: the server returned another number of scores than of tokens.
    """
    longest = min(_CACHED_TOKENS, context - DECODED - 1) - len(text)
    behind = random.Random(name).choices(text, k=longest) if keep else itertools.cycle(text)
    rest = tuple(itertools.islice(behind, max(0, longest)))
    prompt = (*rest, *text) if keep else (*text, *rest)
    together, pairs = await _scored(make, Continuation(name, prompt, Sampling(max_tokens=DECODED), DECODED, seed))
    expected = await make.score(text) if keep else together[: len(text) - 1]
    return Scores(expected, pairs=pairs)


async def _scored(make: Make, wanted: Continuation) -> tuple[tuple[float, ...], tuple[tuple[float, float], ...]]:
    """Sample a continuation, and score it with its prompt at once; returns the scores of all tokens but the first, and
    pairs (as sampled, as scored) of those sampled. Raises WireError if they are not one for each token."""
    sampled, told = list[int](), list[float]()
    async with contextlib.aclosing(make.stream(wanted)) as deltas:
        async for delta in deltas:
            sampled += delta.token_ids
            told += delta.logprobs
    together, before = await make.score([*wanted.token_ids, *sampled]), len(wanted.token_ids) - 1
    if not len(sampled) == len(told) == len(together) - before:
        raise WireError(f"{wanted.id} was not scored: {len(sampled)} tokens, {len(together)} scores")
    return together, tuple(zip(told, together[before:], strict=True))


_SURE = Sampling(max_tokens=8, temperature=0.02, top_k=1, top_p=1e-6)
#: What a server does that `reports_raw`, what is needed instead, and the same where requests may change.
RAW = "reports log-probabilities of tokens as if it sampled them at temperature 1 without filters"
NOT_RAW = "vLLM with --logprobs-mode processed_logprobs, SGLang without SGLANG_RETURN_ORIGINAL_LOGPROB"
NOT_RAW_OR_PLAIN = f"{NOT_RAW}, or a temperature of 1 and no filters"


def is_shaped(sampling: Sampling) -> bool:
    """Whether temperature or filters change the distribution that is sampled from. Greedy decoding does not count."""
    return sampling.temperature not in (0, 1) or sampling.filtered


async def reports_raw(make: Make, vocabulary: int, context: int) -> bool:
    """Whether a server reports log-probabilities without temperature and filters, vLLM's default. It samples where both
    leave the likeliest token alone, nearly or wholly, with a log-probability of 0: these of a server that ignores them
    are nearer to the token's score. `vocabulary`: number of token ids; `context`: length in tokens. Raises WireError
    as `canary_scores`, and if nothing was sampled.
    """
    name, length = f"raw-{secrets.token_hex(8)}", min(LENGTH, context - _SURE.max_tokens - 1)
    prompt = random.Random(name).choices(range(vocabulary), k=length)  # of random tokens no model is sure
    _, pairs = await _scored(make, Continuation(name, prompt, _SURE, _SURE.max_tokens, seed=0))
    if not pairs:
        raise WireError(f"{name} got no token")
    return sum(abs(told - score) for told, score in pairs) < sum(abs(told) for told, _ in pairs)


@dataclass(frozen=True)
class Launch:
    """Command and further environment variables that start a server."""

    command: tuple[str, ...]
    environment: dict[str, str]


@dataclass(frozen=True)
class Room:
    """Memory that a server may use on each of its GPUs. `share`: its fraction of the GPU's `memory` bytes. `planned`:
    bytes of weights and KV cache."""

    share: float
    memory: int
    planned: int


_METHODS = [name for name, one in vars(Make).items() if inspect.isfunction(one) and not name.startswith("_")]


def make_of(kind: str, http: JsonServer, load_seconds: float) -> Make:
    """Make the client of a server. `kind`: ``engine.kind``, a built-in name or a user's class. `http`: sends its
    requests. `load_seconds`: longest wait for a load.

    Raises:
        RecipeError: there is no such class, or it does not take these arguments.
    """
    make: Make = MAKES.load(kind)(http, load_seconds)
    return make


def launch_of(config: EngineConfig, model: str, port: int, room: Room | None = None) -> Launch:
    """Make the command and environment that start a server of `config.kind` on a port. `model`: model folder. `room`:
    its memory on the GPUs, passed by flags from the class's `flags_of_room`, unless `engine.arguments` have these
    flags. There are no such flags if `room` is None, the server runs on the CPU, or the class lacks the method. Raises
    RecipeError if there is no such class."""
    make = MAKES.load(config.kind)
    launch: Launch = getattr(make, "launch")(config, model, port)  # noqa: B009  # of the class
    told = {word.partition("=")[0].replace("_", "-") for word in config.arguments}  # vLLM takes both
    if room is None or config.on_cpu or (flags_of := getattr(make, "flags_of_room", None)) is None:
        return launch
    flags: dict[str, str] = flags_of(config, model, room)
    words = [word for name, value in flags.items() if name not in told for word in (name, value)]
    return replace(launch, command=(*launch.command, *words))


def make_faults(config: EngineConfig, model: str) -> Iterator[str]:
    """Check the class of `engine.kind` without starting a server; yields a description of each fault, nothing for a
    usable class. `model`: model folder, passed to its `launch` (not called if there are `engine.addresses`). Raises
    RecipeError if there is no such class."""
    make = MAKES.load(config.kind)
    if lacking := [name for name in (*_METHODS, "launch") if not callable(getattr(make, name, None))]:
        yield f"has no method {', '.join(lacking)} (docs/how_to/doors/engine.md)"
    for name in _METHODS:
        method = getattr(make, name, None)
        if callable(method) and (differs := _differs(name, method)):
            yield f"has a method {name!r} that {differs}"
    if not isinstance(getattr(make, "capabilities", None), Capabilities):
        yield "has no capabilities, which are a Capabilities of stretto.engine.config"
    elif not lacking and not config.addresses and not isinstance(launch_of(config, model, 1), Launch):
        yield "launch(config, model, port) returned no Launch"


def _differs(name: str, method: Callable[..., object]) -> str:
    """Describe why a method cannot stand in for that of `Make` with this `name`: other arguments, not asynchronous, or
    no generator; "" if it can."""
    wanted: Callable[..., object] = getattr(Make, name)
    parameters = inspect.signature(wanted).parameters.values()
    by_place = [one.name for one in parameters if one.kind is one.POSITIONAL_OR_KEYWORD]
    by_name = {one.name: None for one in parameters if one.kind is one.KEYWORD_ONLY}
    try:
        inspect.signature(method).bind(*by_place, **by_name)
    except TypeError as error:
        return f"is called otherwise: {error}"
    if inspect.iscoroutinefunction(wanted) and not inspect.iscoroutinefunction(method):
        return "is not asynchronous"
    streams = inspect.isasyncgenfunction(method) or name != "stream"
    return "" if streams else "yields nothing: an asynchronous generator is needed"
