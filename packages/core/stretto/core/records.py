"""The records of the stream, one frozen type per stage.

    Prompt ─► GenerateRequest ─► Completion ─► Trajectory (segments + Verdict) ─► Group ─► Batch ─► Update

Each record is complete when it is made: a later stage is a new type, never a field filled in later. All of them
cross process boundaries as MessagePack (msgspec), so they hold plain numbers, strings and tuples only.
"""

from __future__ import annotations

import enum
import hashlib
import math
from collections.abc import Mapping, Sequence
from functools import reduce
from itertools import accumulate, chain
from typing import Any

import msgspec

PROMPT, NOTHING = -1, -2  #: parents of first segments: after the prompt, or with no context at all

#: Tokens with their log-probabilities, the likeliest first.
Likeliest = tuple[tuple[int, float], ...]

#: Engines in the order in which they sampled tokens, with counts: ``(("engine-0", 37), ("engine-2", 5))``. "" is an
#: unrecorded engine.
Writers = tuple[tuple[str, int], ...]


class Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """Base of all records: immutable, unknown fields refused. Records have no cycles, so they are exempt from garbage
    collection, which would slow large runs."""


class StopReason(enum.StrEnum):
    """Why a completion ended."""

    STOP = "stop"  #: the model sampled an end-of-sequence token, or completed a stop text
    LENGTH = "length"  #: the token budget or the context was used up


class Outcome(enum.StrEnum):
    """The outcome of judging a completion."""

    RIGHT = "right"
    WRONG = "wrong"
    UNDECIDED = "undecided"  #: timeout, crash, or a completion that cannot be judged: no reward, never a zero


class State(enum.StrEnum):
    """State of a trajectory. The last four are final; every trajectory ends in exactly one of them."""

    IN_FLIGHT = "in_flight"
    BUFFERED = "buffered"
    TRAINED = "trained"
    FILTERED = "filtered"  #: refused by a filter of the recipe, such as a group without signal
    EXPIRED = "expired"  #: older than the bound, under ``beyond_bound = "expire"``
    FAILED = "failed"  #: no verdict, a lost engine or a refused request; see the reason


class Prompt(Record, frozen=True):
    """A prompt with its gold answer, for the reward.

    Example: ``Prompt(id="17", token_ids=(5, 12, 8, 13), text="3+8=", answer="11")``
    """

    id: str
    token_ids: tuple[int, ...]
    text: str
    answer: str
    opens: str = ""  # thinking tag left open at the end of its tokens


class Sampling(Record, frozen=True):
    """Sampling settings. Engine and trainer have the same ones and evaluate the same distribution.

    `temperature` 0 takes the likeliest token (evaluation only), after any filters. `stop_token_ids` end a completion
    and are part of it.

    Filters apply after the temperature, in the order `top_k`, `top_p`, `min_p`, each to the tokens left by the one
    before; the rest is renormalised. Tokens exactly as likely as the last one kept are kept too. A `grammar` (Lark
    rules, as in llguidance) is the first filter, also at temperature 0.
    """

    max_tokens: int
    temperature: float = 1.0
    stop_token_ids: tuple[int, ...] = ()
    top_p: float = 1.0  # smallest set of likeliest tokens with at least this total probability
    top_k: int = 0  # this many likeliest tokens; 0: all
    min_p: float = 0.0  # tokens at least this fraction as likely as the likeliest
    stop: tuple[str, ...] = ()  # texts that end the completion, whose tokens include those of the stop text
    grammar: str = ""  # grammar of the completion; end of sequence where the grammar ends

    @property
    def filtered(self) -> bool:
        """Whether some tokens are excluded from sampling."""
        return self.temperature > 0 and (self.top_p < 1 or self.top_k > 0 or self.min_p > 0)


class Segment(Record, frozen=True, array_like=True):
    """Consecutive tokens of one origin: sampled by the policy, with logged log-probabilities and versions, or given
    (tool output, a user's turn), without them.

    A sampled segment without a `stop_reason` is unfinished: another engine, or a resumed run, continues it. Engines
    return no `engines`; the pool fills them in.

    Each segment follows the one before it, the first the prompt, unless it names another `parent`: the segments of a
    trajectory are a forest (`conversation.forest`).

    Example: ``Segment(token_ids=(4, 4, 2), behavior_logprobs=(-0.1, -0.7, -0.02), versions=(6, 6, 7))``
    """

    token_ids: tuple[int, ...] = ()  # [L]
    behavior_logprobs: tuple[float, ...] = ()  # [L], nats; empty if given
    versions: tuple[int, ...] = ()  # [L], never decreasing; empty if given
    interrupted: int = 0  # number of weight updates that interrupted it
    stop_reason: StopReason | None = None
    engines: Writers = ()  # of all L tokens; empty if given, or not on record
    parent: int | None = None  # index of the segment it follows, or PROMPT, or NOTHING; None: the previous one
    cause: str = ""  # reason for a branch starting here; else empty
    reward: float | None = None  # reward of this turn, if the workflow gives one per turn

    @property
    def sampled(self) -> bool:
        return bool(self.versions)

    @property
    def writers(self) -> Writers:
        """`engines`; one unrecorded engine if that is empty."""
        return self.engines or ((("", len(self.token_ids)),) if self.token_ids else ())

    def __add__(self, other: Segment) -> Segment:
        """Join two consecutive pieces of one completion."""
        return self.whole((self, other))

    @classmethod
    def whole(cls, pieces: Sequence[Segment]) -> Segment:
        """Join the pieces of one completion (at least one), copying every token once."""
        columns = ("token_ids", "behavior_logprobs", "versions")
        chained = {name: tuple(chain.from_iterable(getattr(piece, name) for piece in pieces)) for name in columns}
        engines = reduce(joined, (piece.writers for piece in pieces)) if any(piece.engines for piece in pieces) else ()
        interrupted, stop_reason = max(piece.interrupted for piece in pieces), pieces[-1].stop_reason
        ends = {"interrupted": interrupted, "stop_reason": stop_reason, "engines": engines}
        return msgspec.structs.replace(pieces[0], **chained, **ends)

    def after(self, tokens: int) -> Segment:
        """The rest after the first `tokens` tokens."""
        return msgspec.structs.replace(
            self,
            token_ids=self.token_ids[tokens:],
            behavior_logprobs=self.behavior_logprobs[tokens:],
            versions=self.versions[tokens:],
            engines=_after(self.engines, tokens),
        )

    def written_by(self, engine: str) -> Segment:
        """A copy that records `engine` as the sampler of all tokens."""
        return msgspec.structs.replace(self, engines=((engine, len(self.token_ids)),) if self.token_ids else ())


#: Unfinished completions, or their new tokens: by request, then by member.
Partials = dict[str, dict[int, Segment]]


class GenerateRequest(Record, frozen=True):
    """One prompt and a seed per completion; member k draws its randomness from ``seeds[k]`` alone.

    `prefixes`: empty, or for each member the segment to continue.

    Example: ``GenerateRequest(id="0.17.0", prompt_token_ids=(5, 12, 8, 13), seeds=(91, 92), sampling=...)``
    """

    id: str
    prompt_token_ids: tuple[int, ...]
    seeds: tuple[int, ...]
    sampling: Sampling
    prefixes: tuple[Segment, ...] = ()
    top_logprobs: int = 0  # number of top log-probabilities to return per token


class Completion(Record, frozen=True):
    """A finished completion, as returned by an engine.

    `versions[t]` is the policy version whose weights sampled token t, `behavior_logprobs[t]` its log-probability under
    exactly that version (AReaL, section 4.1: the behaviour policy is logged token by token).

    Example: three tokens, weights switched before the third::

        Completion(request="0.17.0", member=1, token_ids=(4, 4, 2), behavior_logprobs=(-0.1, -0.7, -0.02),
                   versions=(6, 6, 7), stop_reason=StopReason.STOP, interrupted=1)
    """

    request: str
    member: int
    token_ids: tuple[int, ...]  # [L]
    behavior_logprobs: tuple[float, ...]  # [L], nats
    versions: tuple[int, ...]  # [L], never decreasing
    stop_reason: StopReason
    interrupted: int = 0  # number of weight updates that interrupted it
    top_logprobs: tuple[Likeliest, ...] = ()  # [L], of the sampled distributions; empty if not requested
    engines: Writers = ()  # of all L tokens; empty if not on record

    @property
    def segment(self) -> Segment:
        """Its tokens and stop reason as a segment."""
        columns = (self.token_ids, self.behavior_logprobs, self.versions, self.interrupted, self.stop_reason)
        return Segment(*columns, self.engines)

    def written_by(self, engine: str, prefix: Segment) -> Completion:
        """A copy that records `engine` as the sampler of the tokens after `prefix`, which others sampled."""
        new = len(self.token_ids) - len(prefix.token_ids)
        return msgspec.structs.replace(self, engines=joined(prefix.writers, ((engine, new),) if new > 0 else ()))

    @classmethod
    def of(cls, request: str, member: int, segment: Segment) -> Completion:
        """The completion for a finished segment.

        Raises:
            ValueError: the segment is unfinished.
        """
        if segment.stop_reason is None:
            raise ValueError(f"completion {request}/{member} has no end")
        return cls(
            request=request,
            member=member,
            token_ids=segment.token_ids,
            behavior_logprobs=segment.behavior_logprobs,
            versions=segment.versions,
            stop_reason=segment.stop_reason,
            interrupted=segment.interrupted,
            engines=segment.engines,
        )


class Verdict(Record, frozen=True):
    """Judgement of one completion. `reward` is None exactly if undecided. `rewards`: the named, unweighted parts of the
    reward; empty if it has none."""

    outcome: Outcome
    reward: float | None
    reason: str = ""
    rewards: Mapping[str, float] = {}

    def __post_init__(self) -> None:
        if (self.reward is None) != (self.outcome is Outcome.UNDECIDED):
            raise ValueError(f"a verdict has a reward unless it is undecided: {self.outcome}, {self.reward}")
        if self.reward == 0:  # SQLite keeps no negative zero; sealed values must read back equal
            msgspec.structs.force_setattr(self, "reward", 0.0)


class Trajectory(Record, frozen=True):
    """A prompt's completion with its verdict: the unit of the buffer and of training.

    A single turn is one sampled segment; further turns alternate given and sampled segments, and an agent's session may
    branch. Only sampled tokens are in the loss, each once.

    Example: ``Trajectory(id="0.17.0/3", segments=(Segment(...),), verdict=..., text="9")``
    """

    id: str
    segments: tuple[Segment, ...]
    verdict: Verdict
    text: str
    session: str = ""  # name of the agent's session, if it was one

    @property
    def member(self) -> int:
        """Index in its group."""
        return int(self.id.rpartition("/")[2])

    @property
    def token_ids(self) -> tuple[int, ...]:
        """[T] all tokens after the prompt, sampled and given."""
        return self._joined("token_ids")

    @property
    def behavior_logprobs(self) -> tuple[float, ...]:
        """[S] log-probabilities of the sampled tokens."""
        return self._joined("behavior_logprobs")

    @property
    def versions(self) -> tuple[int, ...]:
        """[S] versions of the sampled tokens."""
        return self._joined("versions")

    def _joined(self, field: str) -> tuple[Any, ...]:
        if len(self.segments) == 1:  # a single turn, without a copy: this is called for every decision
            return getattr(self.segments[0], field)  # type: ignore[no-any-return]
        return tuple(chain.from_iterable(getattr(segment, field) for segment in self.segments))

    @property
    def stop_reason(self) -> StopReason | None:
        """Stop reason of its last sampled segment."""
        if len(self.segments) == 1:
            return self.segments[0].stop_reason
        return next((segment.stop_reason for segment in reversed(self.segments) if segment.stop_reason), None)

    @property
    def interrupted(self) -> int:
        """Number of weight updates that interrupted it."""
        return sum(segment.interrupted for segment in self.segments)

    @property
    def reward(self) -> float:
        """The reward of a decided trajectory.

        Raises:
            ValueError: the verdict is undecided; such a trajectory should have been failed.
        """
        if self.verdict.reward is None:
            raise ValueError(f"trajectory {self.id} is undecided ({self.verdict.reason}) and has no reward")
        return self.verdict.reward


class Group(Record, frozen=True):
    """The decided completions of one prompt, admitted together at one version.

    Example: ``Group(id="0.17.0", prompt=..., admitted_version=6, trajectories=(<8 of them>))``
    """

    id: str
    prompt: Prompt
    admitted_version: int
    trajectories: tuple[Trajectory, ...]
    max_staleness: float = math.inf  # staleness bound at its admission; inf if unknown

    @property
    def oldest_version(self) -> int:
        """The oldest version that sampled any token of the group."""
        sampled = (segment.versions for trajectory in self.trajectories for segment in trajectory.segments)
        return min((versions[0] for versions in sampled if versions), default=0)


class Batch(Record, frozen=True):
    """Input of one training step: B groups, trained at `version`, which publishes ``version + 1``.

    Tokens sampled by versions older than `oldest_trainable` are context only (``beyond_bound = "mask"``).
    `oldest_by_group` overrides it for groups admitted under a stricter bound, by group id.
    """

    step: int
    version: int
    groups: tuple[Group, ...]
    oldest_trainable: int = 0
    oldest_by_group: Mapping[str, int] = {}

    def oldest_of(self, group: str) -> int:
        """Oldest version whose tokens are in the loss for this group."""
        return self.oldest_by_group.get(group, self.oldest_trainable)


class Update(Record, frozen=True):
    """Result of a training step: the published version and its metrics (docs/reference/metrics.md).

    `skipped`: trajectories of optimizer steps that were skipped because of a non-finite gradient.
    """

    step: int
    version: int
    trained_tokens: int
    masked_tokens: int
    metrics: dict[str, float]
    skipped: tuple[str, ...] = ()


def joined(first: Writers, second: Writers) -> Writers:
    """Writers of two consecutive texts as one list; an engine that ends the first and starts the second is counted
    once.

    >>> joined((("a", 5),), (("a", 2), ("b", 1)))
    (('a', 7), ('b', 1))
    """
    if first and second and first[-1][0] == second[0][0]:
        (name, count), (_, more) = first[-1], second[0]
        return (*first[:-1], (name, count + more), *second[1:])
    return first + second


def _after(writers: Writers, tokens: int) -> Writers:
    """Writers of the rest after the first `tokens` tokens."""
    ends = tuple(accumulate(count for _, count in writers))
    return tuple(
        (name, min(count, end - tokens)) for (name, count), end in zip(writers, ends, strict=True) if end > tokens
    )


def trajectory_id(group: str, member: int) -> str:
    """Id of a trajectory: ``"0.17.0/3"`` is epoch 0, row 17, first attempt, fourth completion."""
    return f"{group}/{member}"


def derive_seed(*parts: int | str) -> int:
    """A 63-bit seed that depends on all parts alone; equal on every machine.

    >>> derive_seed(1, "0.17.0/3") == derive_seed(1, "0.17.0/3") != derive_seed(2, "0.17.0/3")
    True
    """
    text = "\x1f".join(str(part) for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1
