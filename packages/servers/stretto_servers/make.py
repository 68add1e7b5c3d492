"""What one make of inference server (vLLM, SGLang) does in its own way; one file per make implements it.

`engine.kind` names its class (`MAKES` in `engine.config`), a built-in or one of the user's own. Beside the methods of
`Make` the class has `capabilities`, an `engine.capabilities.Capabilities`, and a static method ``launch(config, model,
port)``, which says how a server is started (`Launch`).
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
    """The next tokens of a completion, with their log-probabilities (nats) under the distribution sampled from.

    `ended` is empty while more tokens come; then it says why they ended: ``"stop"``, ``"length"`` or ``"abort"``.
    `spans`, where the server tells them, are the weight versions of the whole request: ``(version, start, end)``.
    """

    token_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    top_logprobs: tuple[Likeliest, ...] = ()
    ended: str = ""
    spans: tuple[tuple[str, int, int], ...] = ()


@dataclass(frozen=True)
class Continuation:
    """One completion to generate from all tokens so far, prompt included."""

    id: str
    token_ids: Sequence[int]
    sampling: Sampling
    max_tokens: int  # still to come
    seed: int
    top_logprobs: int = 0


@dataclass(frozen=True)
class Served:
    """What a server says of itself; None where it does not say."""

    release: str
    model: str
    context_length: int | None
    architecture: str | None = None


@dataclass(frozen=True)
class Occupancy:
    """What a server says of its requests, those that wait in it included. `cache`: the share of its KV cache that is in
    use, which the waiting ones will come to need likewise; `preempted`: counted from its start."""

    running: int
    waiting: int
    cache: float
    preempted: int = 0

    @property
    def needed(self) -> float:
        """KV cache for all requests, over what there is."""
        return self.cache * (self.running + self.waiting) / max(1, self.running)


class Make(Protocol):
    """The wire of one server. Every method has a deadline of its own and raises EngineLost when nobody answers.

    The class is called with an `stretto_servers.http.JsonServer` and the longest wait for a load, in seconds.
    """

    def stream(self, continuation: Continuation) -> AsyncGenerator[Delta]:
        """The tokens of a completion as they come. Leaving the iteration early aborts it on the server.

        Raises:
            RefusedRequest: the server will not serve it.
            WireError: a reply that is not as this make documents it.
        """
        ...

    async def ready(self) -> bool:
        """Whether the server can be asked by now."""
        ...

    async def describe(self) -> Served:
        """What it serves.

        Raises:
            WireError: it lacks an endpoint that stretto needs; the error names it and the release that has it.
        """
        ...

    async def occupancy(self) -> Occupancy:
        """How full it is.

        Raises:
            WireError: it does not say.
        """
        ...

    async def pause(self, *, keep: bool) -> None:
        """Let no request sample another token until `resume`. `keep`: they stay as they are, KV cache included; else
        they end with "abort" and the server's caches are cleared."""
        ...

    async def load(self, folder: Path, version: int, *, keep: bool) -> None:
        """Load the safetensors of a folder as `version`, while the server is paused; `keep`: the KV cache stays. It may
        take as long as it likes while `read` grows."""
        ...

    async def resume(self) -> None:
        """Go on sampling, with the weights that are loaded."""
        ...

    async def score(self, token_ids: Sequence[int]) -> tuple[float, ...]:
        """The log-probabilities, at temperature 1, of all tokens of a text but the first; the server is not paused.

        Raises:
            WireError: a reply that is not as this make documents it.
        """
        ...

    async def held(self, folder: Path, shapes: Mapping[str, Sequence[int]]) -> Sequence[Mapping[str, str]]:
        """What each worker holds of the tensors with these shapes (`worker.readback`), after a load from the folder;
        nothing where the server cannot look."""
        ...

    @property
    def read(self) -> int:
        """Bytes of versions that the server has read, as far as that shows: they grow while a load goes on."""
        ...

    async def close(self) -> None:
        """Close the connections."""
        ...


_CACHED_TOKENS = 288  # two blocks of the largest cache pages that servers have by default, and more


async def canary_scores(make: Make, text: Sequence[int], name: str, seed: int, context: int, *, keep: bool) -> Scores:
    """The canary by a server, which goes on with the text, repeated over some blocks of its cache, and then computes
    all of it at once: entries of earlier weights that it still has show in what it sampled. With `keep` it may have
    them: then it goes on with a text that it has never had.

    Args:
        name: a name that no request of this server has had.
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
    """How a server of one make is started."""

    command: tuple[str, ...]
    environment: dict[str, str]
