"""Interface of one make of inference server (vLLM, SGLang); one file per make implements it.

`engine.kind` names its class (`MAKES` in `engine.config`), built-in or user-defined. Beside the methods of `Make`, the
class has `capabilities`, an `engine.capabilities.Capabilities`, and a static method ``launch(config, model, port)``,
which returns how to start a server (`Launch`).
"""

from __future__ import annotations

import contextlib
import itertools
import random
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from stretto.core.canary import DECODED, Scores
from stretto.core.errors import WireError
from stretto.core.records import Likeliest, Record, Sampling


class Delta(Record, frozen=True):
    """Next tokens of a completion, with their log-probabilities (nats) under the distribution sampled from.

    `ended`: why the completion ended (``"stop"``, ``"length"``, ``"abort"``), empty while more tokens come. `spans`:
    weight versions of the whole request, if the server tells them: ``(version, start, end)``.
    """

    token_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    top_logprobs: tuple[Likeliest, ...] = ()
    ended: str = ""
    spans: tuple[tuple[str, int, int], ...] = ()


@dataclass(frozen=True)
class Continuation:
    """Request to generate one completion after the given tokens (prompt and completion so far)."""

    id: str
    token_ids: Sequence[int]
    sampling: Sampling
    max_tokens: int  # still to come
    seed: int
    top_logprobs: int = 0


@dataclass(frozen=True)
class Served:
    """A server's description of itself; None where it does not tell."""

    release: str
    model: str
    context_length: int | None
    architecture: str | None = None


@dataclass(frozen=True)
class Occupancy:
    """Load of a server, waiting requests included. `cache`: used share of its KV cache; `preempted`: total since its
    start."""

    running: int
    waiting: int
    cache: float
    preempted: int = 0

    @property
    def needed(self) -> float:
        """KV cache needed by all requests, relative to its size."""
        return self.cache * (self.running + self.waiting) / max(1, self.running)


class Make(Protocol):
    """Client of one server (Protocol). Every method has its own deadline and raises EngineLost when nobody answers.

    The class is called with a `stretto_servers.http.JsonServer` and the longest wait for a load, in seconds.
    """

    def stream(self, continuation: Continuation) -> AsyncGenerator[Delta]:
        """Generate a completion, yielding tokens as they come. Leaving the iteration aborts it on the server.

        Raises:
            RefusedRequest: the server refuses it.
            WireError: a reply differs from this make's documentation.
        """
        ...

    async def ready(self) -> bool:
        """Whether the server accepts requests now."""
        ...

    async def describe(self) -> Served:
        """Description of what the server serves.

        Raises:
            WireError: it lacks an endpoint that stretto needs; the error names it and the release that has it.
        """
        ...

    async def occupancy(self) -> Occupancy:
        """Current load.

        Raises:
            WireError: the server does not tell it.
        """
        ...

    async def pause(self, *, keep: bool) -> None:
        """Stop all sampling until `resume`. `keep`: requests and their KV cache stay; otherwise they end with "abort"
        and the server's caches are cleared."""
        ...

    async def load(self, folder: Path, version: int, *, keep: bool) -> None:
        """Load the safetensors of a folder as `version`, while the server is paused; `keep`: the KV cache stays. There
        is no time limit while `read` grows."""
        ...

    async def resume(self) -> None:
        """Resume sampling with the loaded weights."""
        ...

    async def score(self, token_ids: Sequence[int]) -> tuple[float, ...]:
        """Log-probabilities, at temperature 1, of all tokens of a text but the first; the server is not paused.

        Raises:
            WireError: a reply differs from this make's documentation.
        """
        ...

    async def held(self, folder: Path, shapes: Mapping[str, Sequence[int]]) -> Sequence[Mapping[str, str]]:
        """Content of each worker's memory for the tensors with these shapes, as sums (`worker.readback`), after a load
        from the folder; empty if the server cannot tell."""
        ...

    @property
    def read(self) -> int:
        """Bytes of weights that the server has read, as far as known; grows during a load."""
        ...

    async def close(self) -> None:
        """Close the connections."""
        ...


_CACHED_TOKENS = 288  # two blocks of the largest cache pages that servers have by default, and more


async def canary_scores(make: Make, text: Sequence[int], name: str, seed: int, context: int, *, keep: bool) -> Scores:
    """Canary challenge to a server: it continues the text, repeated over several cache blocks, and then scores all of
    it at once. KV entries of earlier weights show as differences between the two. With `keep`, such entries are
    legitimate; then it continues a text that it has never had.

    Args:
        name: a unique request name.
    """
    longest = min(_CACHED_TOKENS, context - DECODED - 1) - len(text)
    behind = random.Random(name).choices(text, k=longest) if keep else itertools.cycle(text)
    rest = tuple(itertools.islice(behind, max(0, longest)))
    prompt = (*rest, *text) if keep else (*text, *rest)
    wanted = Continuation(name, prompt, Sampling(max_tokens=DECODED), DECODED, seed)
    sampled, decoded = list[int](), list[float]()
    async with contextlib.aclosing(make.stream(wanted)) as deltas:
        async for delta in deltas:
            sampled += delta.token_ids
            decoded += delta.logprobs
    together = await make.score([*prompt, *sampled])
    expected = await make.score(text) if keep else together[: len(text) - 1]
    if not len(sampled) == len(decoded) == len(together) - len(prompt) + 1:
        raise WireError(f"{name} was not scored: {len(sampled)} tokens, {len(together)} scores")
    pairs = tuple(zip(decoded, together[len(prompt) - 1 :], strict=True))
    return Scores(expected, pairs=pairs)


@dataclass(frozen=True)
class Launch:
    """How to start a server of one make: command, environment."""

    command: tuple[str, ...]
    environment: dict[str, str]


@dataclass(frozen=True)
class Room:
    """A server's part of each of its GPUs: `share` of `memory` bytes, of which `planned` are weights and cache."""

    share: float
    memory: int
    planned: int
