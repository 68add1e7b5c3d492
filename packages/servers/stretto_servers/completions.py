"""Open completions of an external engine: their tokens so far, and whether the version of each is known."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from stretto.core.errors import WireError
from stretto.core.records import Completion, GenerateRequest, Likeliest, Segment, StopReason, derive_seed
from stretto.engine.backend import Stream
from stretto.engine.text import Watch
from stretto_servers.make import NO_PROBABILITY, Continuation, Delta


@dataclass
class OpenCompletion:
    """One completion in progress, which may take several requests to the server.

    If updates recompute KV caches, each update ends the server's request, and the next request has all tokens so far as
    prompt. So all tokens of a request have one version. If KV caches are kept, a request continues through updates, and
    the server tells the versions of its tokens at the end. Until then, tokens sampled after an update are uncertain.

    Attributes:
        member: index of the completion in its request.
        limit: most tokens: `max_tokens`, or the room in the context.
        watch: finds the end of a stop text in the tokens; None if the request has no stop texts.
        interrupted: number of weight updates that interrupted it.
        told: number of tokens of the request in progress.
        uncertain: number of these, the last ones, whose version is not known yet, or not proven.
        asked: whether a request is in progress.
        had: versions that the server has had during the request in progress.
        done: whether the completion has ended and was passed to its stream.
        stopped: whether its tokens have completed a stop text.
    """

    request: GenerateRequest
    member: int
    stream: Stream
    limit: int
    watch: Watch | None
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    likeliest: list[Likeliest] = field(default_factory=list)
    interrupted: int = 0
    told: int = 0
    uncertain: int = 0
    asked: bool = False
    had: list[int] = field(default_factory=list)
    done: bool = False
    stopped: bool = False

    def __post_init__(self) -> None:
        prefix = self.request.prefixes[self.member] if self.request.prefixes else Segment()
        self.token_ids += prefix.token_ids
        self.logprobs += prefix.behavior_logprobs
        self.versions += prefix.versions
        self.likeliest += [()] * prefix.length if self.request.top_logprobs else []  # they are not known
        self.interrupted = prefix.interrupted
        self.stopped = self.watch is not None and self.watch.completed(prefix.token_ids)

    def continuation(self, attempt: int, version: int) -> Continuation:
        """Make the next request to the server, which has `version`, and reset the state of the request in progress. The
        seed depends on the number of tokens so far, because repeating the same random numbers would change the
        distribution. `attempt`: number that makes the request's id unique."""
        self.told = self.uncertain = 0
        self.had = [version]
        request, done = self.request, len(self.token_ids)
        seed = request.seeds[self.member]
        return Continuation(
            id=f"{request.id}-{self.member}-{attempt}",
            token_ids=(*request.prompt_token_ids, *self.token_ids),
            sampling=request.sampling,
            max_tokens=self.limit - done,
            seed=seed if not done and seed < 1 << 63 else derive_seed(seed, done),  # servers take 63 bits
            top_logprobs=request.top_logprobs,
        )

    def take(self, delta: Delta, version: int, vocab_size: int) -> bool:
        """Add new tokens of the server, with `version`, of a vocabulary of `vocab_size`; returns whether they complete
        a stop text. Tokens after the one that completes it are dropped.

        Raises:
            WireError: a token is outside the vocabulary or follows a stop token; a log-probability is positive, not
                finite, or that of a token without probability; there is not one for each token (and not as many top
                lists, if they are requested); or there are more tokens than requested.
        """
        self._check(delta, vocab_size)
        for place, token in enumerate(delta.token_ids):
            self.token_ids.append(token)
            self.logprobs.append(delta.logprobs[place])
            self.versions.append(version)
            if delta.top_logprobs:
                self.likeliest.append(delta.top_logprobs[place])
            self.told += 1
            self.uncertain += len(self.had) > 1
            if self.watch is not None and self.watch.completed((token,)):
                self.stopped = True
                break
        return self.stopped

    def _check(self, delta: Delta, vocab_size: int) -> None:
        request, count = self.request, len(delta.token_ids)
        if len(delta.logprobs) != count or len(delta.top_logprobs) != (count if request.top_logprobs else 0):
            found = f"{count} tokens, {len(delta.logprobs)} log-probabilities and {len(delta.top_logprobs)} top lists"
            raise WireError(f"{request.id}: the server sent {found}")
        if count > self.limit - len(self.token_ids):
            raise WireError(f"{request.id}: the server sent more than the {self.limit} tokens that it was asked for")
        before = (*(self.token_ids[-1:] if self.told else ()), *delta.token_ids)[:-1] if count else ()
        if ends := [token for token in before if token in request.sampling.stop_token_ids]:
            raise WireError(f"{request.id}: the server continued after the stop token {ends[0]}")
        likeliest = [pair for pairs in delta.top_logprobs for pair in pairs]
        ids = (*delta.token_ids, *(token for token, _ in likeliest))
        if wrong := [token for token in ids if not 0 <= token < vocab_size]:
            raise WireError(f"{request.id}: the server sent token {wrong[0]}; the vocabulary has 0 to {vocab_size - 1}")
        numbers = (*delta.logprobs, *(number for _, number in likeliest))
        if odd := [number for number in numbers if not (math.isfinite(number) and number <= _ROUNDING)]:
            raise WireError(f"{request.id}: the server sent a log-probability of {odd[0]}")
        if odd := [number for number in delta.logprobs if number < NO_PROBABILITY]:
            raise WireError(f"{request.id}: the server sent {odd[0]} in place of a log-probability of a sampled token")

    @property
    def whole(self) -> str:
        """Reason why the completion has ended by its tokens alone: "stop" after a stop token or text, "length" at the
        limit; "" if it goes on. Needed because a pause may end the request before the server reports the end."""
        if self.stopped or (self.token_ids and self.token_ids[-1] in self.request.sampling.stop_token_ids):
            return "stop"
        return "length" if len(self.token_ids) >= self.limit else ""

    def check_end(self, reason: str) -> None:
        """Check the server's reason for the end of the completion ("stop" or "length"; others pass), so that no
        truncated one is trained on as complete.

        Raises:
            WireError: "stop" without a stop token, or "length" before the limit.
        """
        tokens = len(self.token_ids)
        if reason == "stop" and not (self.told and self.token_ids[-1] in self.request.sampling.stop_token_ids):
            raise WireError(f"{self.request.id}: the server stopped after {tokens} tokens, the last no stop token")
        if reason == "length" and tokens != self.limit:
            raise WireError(
                f"{self.request.id}: the server ended after {tokens} of {self.limit} tokens, for its length"
            )

    def stamp(self, spans: tuple[tuple[str, int, int], ...], *, loaded: bool) -> None:
        """Set the versions of the finished request's tokens from the server's spans (version, start, end), if an update
        came meanwhile; otherwise only compare. `spans` may be empty then.

        `loaded`: whether the server has loaded a version. If so, spans that name the weights of the server's start are
        refused: the server was started again meanwhile, or is another one at the same address.

        Raises:
            WireError: the spans contradict the versions that the server has had.
        """
        told = _by_token(spans, self.told, loaded=loaded)
        first, certain = len(self.versions) - self.told, self.told - self.uncertain
        if len(self.had) > 1:
            fits = len(told) == self.told and told == sorted(told) and set(told) <= set(self.had)
            fits = fits and told[:certain] == self.versions[first : first + certain]
        else:
            fits = not spans or told == self.versions[first:]
        if not fits:
            found = sorted({name for name, _, _ in spans})
            raise WireError(f"{self.request.id}: the server says that versions {found} sampled it; it had {self.had}")
        if len(self.had) > 1:
            self.versions[first:] = told
        self.uncertain = 0

    def plainly_sampled(self) -> tuple[tuple[int, ...], tuple[float, ...]]:
        """Prompt and all tokens so far, and the log-probabilities of the current request's tokens, which are the last
        ones. The latter are empty if no request is in progress, or sampling has a temperature other than 1 or a
        filter."""
        sampling = self.request.sampling
        plain = self.asked and sampling.temperature == 1 and not sampling.filtered
        told = tuple(self.logprobs[-self.told :]) if plain and self.told else ()
        return (*self.request.prompt_token_ids, *self.token_ids), told

    def interrupt(self) -> bool:
        """Count an interruption of the current request, if it has tokens; returns whether it has."""
        self.interrupted += self.told > 0
        return self.told > 0

    def distrust(self) -> None:
        """Mark all tokens of the current request as uncertain, so that `segment` leaves them out."""
        self.uncertain = self.told

    def doubt(self, version: int) -> None:
        """Mark the tokens of the finished request that `version`, or a newer one, sampled as uncertain: it is not
        proven."""
        first = len(self.versions) - self.told
        self.uncertain = sum(one >= version for one in self.versions[first:])

    def take_back(self, watch: Watch | None) -> int:
        """Drop the uncertain tokens of the current request, which has ended; returns their number. `watch`: finds stop
        texts from the first token on; None: there are none."""
        end, dropped = len(self.token_ids) - self.uncertain, self.uncertain
        for column in (self.token_ids, self.logprobs, self.versions, self.likeliest):
            del column[end:]
        self.told, self.uncertain, self.had, self.watch = self.told - dropped, 0, [], watch
        self.stopped = watch is not None and watch.completed(self.token_ids)
        return dropped

    def segment(self, known: int) -> Segment:
        """Tokens after the first `known` ones, up to the first one of uncertain version, as an unfinished segment."""
        end = len(self.token_ids) - self.uncertain
        return Segment.of(
            token_ids=tuple(self.token_ids[known:end]),
            behavior_logprobs=tuple(self.logprobs[known:end]),
            versions=tuple(self.versions[known:end]),
            interrupted=self.interrupted,
        )

    def end(self, reason: StopReason) -> None:
        """Pass the finished completion to its stream, and mark it as done."""
        self.done = True
        segment = Segment.of(self.token_ids, self.logprobs, self.versions, self.interrupted, reason)
        self.stream.ended(Completion(self.request.id, self.member, segment, tuple(self.likeliest)))


def _by_token(spans: tuple[tuple[str, int, int], ...], count: int, *, loaded: bool) -> list[int]:
    """Version of each of the first `count` tokens; -1 for a name that is not a version. Empty if the spans have gaps or
    overlap. Shorter than `count` if the spans end earlier. `loaded`: see `OpenCompletion.stamp`."""
    told: list[int] = []
    reached = 0
    for name, start, end in spans:
        if start != reached or end < start:
            return []
        reached = end
        name = "0" if name == _STARTED_WITH and not loaded else name
        version = int(name) if name.isdecimal() and len(name) <= _LONGEST_VERSION else -1
        told += [version] * (min(end, count) - min(start, count))
    return told


_LONGEST_VERSION = 18  # digits
_STARTED_WITH = "default"  #: name in vLLM and SGLang for the weights that the server was started with
_ROUNDING = 1e-3  #: largest accepted log-probability; rounding in half precision may give more than 0
