"""The completions that an external engine has open: what has come of each, and what may be told of it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from stretto.core.errors import WireError
from stretto.core.records import Completion, GenerateRequest, Likeliest, Segment, StopReason, derive_seed
from stretto.engine.backend import Stream
from stretto.engine.external.make import Continuation, Delta
from stretto.engine.native.stops import Watch


@dataclass
class OpenCompletion:
    """One completion while it grows.

    A server is asked again after each update that recomputes: the tokens so far are part of its prompt then. What it
    has told of the request in progress (`told` tokens) has one version, or, if KV caches are kept, several, which the
    server tells at the end; until then tokens after an update are `uncertain`.
    """

    request: GenerateRequest
    member: int
    stream: Stream
    limit: int  # tokens at most: max_tokens, or what the context leaves
    watch: Watch | None
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    likeliest: list[Likeliest] = field(default_factory=list)
    interrupted: int = 0
    told: int = 0  # tokens of the request in progress
    uncertain: int = 0  # of these, tokens whose version is not known yet
    asked: bool = False  # a request is in progress
    updated: bool = False  # weights were loaded under the request in progress, whose KV cache was kept

    def __post_init__(self) -> None:
        prefix = self.request.prefixes[self.member] if self.request.prefixes else Segment()
        self.token_ids += prefix.token_ids
        self.logprobs += prefix.behavior_logprobs
        self.versions += prefix.versions
        self.interrupted = prefix.interrupted
        if self.watch is not None:
            self.watch.completed(prefix.token_ids)

    def continuation(self, attempt: int) -> Continuation:
        """What is asked of the server now. Its seed depends on the tokens so far: to begin the same random numbers
        anew behind them would sample from another distribution."""
        self.told = self.uncertain = 0
        self.updated = False
        request, done = self.request, len(self.token_ids)
        seed = request.seeds[self.member]
        return Continuation(
            id=f"{request.id}-{self.member}-{attempt}",
            token_ids=(*request.prompt_token_ids, *self.token_ids),
            sampling=request.sampling,
            max_tokens=self.limit - done,
            seed=derive_seed(seed, done) if done else seed >> 1,  # servers take 63 bits
            top_logprobs=request.top_logprobs,
        )

    def take(self, delta: Delta, version: int, vocab_size: int) -> bool:
        """Add tokens; whether they complete a stop text, behind whose last token nothing is added.

        Raises:
            WireError: they are not tokens of this model with their log-probabilities.
        """
        _check(self.request.id, delta, vocab_size)
        stopped = False
        for place, token in enumerate(delta.token_ids):
            self.token_ids.append(token)
            self.logprobs.append(delta.logprobs[place])
            self.versions.append(version)
            if delta.top_logprobs:
                self.likeliest.append(delta.top_logprobs[place])
            self.told += 1
            self.uncertain += self.updated
            if self.watch is not None and self.watch.completed((token,)):
                stopped = True
                break
        return stopped

    def stamp(self, spans: tuple[tuple[str, int, int], ...], version: int) -> None:
        """Take the versions that the server tells of the request that has ended; `version` is the one it has now.

        Raises:
            WireError: they contradict the versions that it was given.
        """
        told = [int(name) if name.isdecimal() else -1 for name, start, end in spans for _ in range(start, end)]
        told = told[: self.told]
        ours = self.versions[len(self.versions) - self.told :]
        if self.updated:
            fits = len(told) == self.told and told == sorted(told) and set(told) <= set(range(version + 1))
            fits = fits and told[: self.told - self.uncertain] == ours[: self.told - self.uncertain]
        else:
            fits = not spans or told == ours
        if not fits:
            found = sorted({name for name, _, _ in spans})
            raise WireError(f"{self.request.id}: the server says that versions {found} sampled it; it has {version}")
        if self.updated:
            self.versions[len(self.versions) - self.told :] = told
        self.uncertain = 0

    def segment(self, known: int) -> Segment:
        """What is certain beyond the first `known` tokens."""
        end = len(self.token_ids) - self.uncertain
        return Segment(
            token_ids=tuple(self.token_ids[known:end]),
            behavior_logprobs=tuple(self.logprobs[known:end]),
            versions=tuple(self.versions[known:end]),
            interrupted=self.interrupted,
        )

    def end(self, reason: StopReason) -> None:
        """Hand it to its stream."""
        completion = Completion(
            request=self.request.id,
            member=self.member,
            token_ids=tuple(self.token_ids),
            behavior_logprobs=tuple(self.logprobs),
            versions=tuple(self.versions),
            stop_reason=reason,
            interrupted=self.interrupted,
            top_logprobs=tuple(self.likeliest),
        )
        self.stream.ended(completion)


def _check(request: str, delta: Delta, vocab_size: int) -> None:
    if len(delta.logprobs) != len(delta.token_ids):
        found = f"{len(delta.token_ids)} tokens and {len(delta.logprobs)} log-probabilities"
        raise WireError(f"{request}: the server sent {found}")
    if wrong := [token for token in delta.token_ids if not 0 <= token < vocab_size]:
        raise WireError(f"{request}: the server sent token {wrong[0]}; the vocabulary has 0 to {vocab_size - 1}")
    if odd := [number for number in delta.logprobs if not (math.isfinite(number) and number <= _ROUNDING)]:
        raise WireError(f"{request}: the server sent a log-probability of {odd[0]}")


_ROUNDING = 1e-3  #: above 0, for a probability of 1 in half precision
