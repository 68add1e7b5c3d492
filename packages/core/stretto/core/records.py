"""The records of the stream, one frozen type per stage.

    Prompt ─► GenerateRequest ─► Completion ─► Trajectory (segments + Verdict) ─► Group ─► Batch ─► Update

Each record is complete when it is made: a later stage is a new type, never a field filled in later. All of them
cross process boundaries as MessagePack (msgspec), so they hold plain numbers, strings, bytes and tuples only.
"""

from __future__ import annotations

import enum
import hashlib
import math
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import msgspec

from stretto.core import columns as packed
from stretto.core.columns import Counted, Stamps
from stretto.core.frames import Count

PROMPT, NOTHING = -1, -2  #: parents of first segments: after the prompt, or with no context at all

#: (token id, log-probability) pairs of one position, the likeliest first.
Likeliest = tuple[tuple[int, float], ...]

#: Engines that sampled the tokens of a segment, in the order of the tokens, each with its number of consecutive tokens:
#: ``(("engine-0", 37), ("engine-2", 5))``. The name "" stands for an engine that was not recorded.
Writers = Counted[str]


class Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """Base of all records: immutable, unknown fields refused. Records have no cycles, so they are exempt from garbage
    collection, which would slow large runs."""


class StopReason(enum.StrEnum):
    """Reason why a completion ended; an unfinished or aborted one has none."""

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
    """A prompt with its gold answer, for the reward. `opens`: thinking tag left open at the end of its tokens; "" if
    none is.

    Example: ``Prompt(id="17", token_ids=(5, 12, 8, 13), text="3+8=", answer="11")``
    """

    id: str
    token_ids: tuple[int, ...]
    text: str
    answer: str
    opens: str = ""


class Sampling(Record, frozen=True):
    """Sampling settings of a request. Engine and trainer use the same settings, so both evaluate the same distribution.

    `temperature` 0 takes the likeliest token (evaluation only). A token of `stop_token_ids` ends a completion and is
    its last token.

    Filters apply after the temperature, in the order `top_k`, `top_p`, `min_p`. Each acts on the tokens that the
    previous filter left, and the remaining probabilities are renormalised. Tokens exactly as likely as the last token
    kept are kept too. A `grammar` (Lark rules, as in llguidance) applies before the other filters, also at temperature
    0.
    """

    max_tokens: int
    temperature: float = 1.0
    stop_token_ids: tuple[int, ...] = ()
    top_p: float = 1.0  # keeps the smallest set of likeliest tokens with at least this total probability
    top_k: int = 0  # keeps this many likeliest tokens; 0: all
    min_p: float = 0.0  # keeps tokens at least this fraction as likely as the likeliest
    stop: tuple[str, ...] = ()  # texts that end the completion; the stop text is part of the completion
    grammar: str = ""  # grammar of the completion; end of sequence where the grammar ends

    @property
    def filtered(self) -> bool:
        """Whether `top_p`, `top_k` or `min_p` exclude tokens; False at temperature 0. A grammar does not count."""
        return self.temperature > 0 and (self.top_p < 1 or self.top_k > 0 or self.min_p > 0)


class Segment(Record, frozen=True, array_like=True):
    """Consecutive tokens of one origin, either sampled or given. Sampled tokens have logged log-probabilities and
    versions; given tokens (tool output, a user's turn) have neither.

    The tokens are sealed: the bytes `columns` (`core.columns`) and their checksum pass unchanged from the engine to the
    ledger and the trainer. Scheduling reads `length` and `stamps` only. The properties `token_ids`,
    `behavior_logprobs` and `versions` decode the bytes at each call.

    A sampled segment without a `stop_reason` is unfinished: another engine, or a resumed run, continues it. Engines
    leave `engines` empty; the engine pool fills it in.

    The segments of a trajectory are a forest (`core.forest`): a segment follows the previous segment, and the
    first segment follows the prompt, unless `parent` says otherwise.

    Example: ``Segment.of(token_ids=(4, 4, 2), behavior_logprobs=(-0.1, -0.7, -0.02), versions=(6, 6, 7))``
    """

    columns: bytes = b""  # token ids and log-probabilities of the L tokens
    length: Count = 0  # L
    stamps: Stamps = ()  # versions, never decreasing; empty if the tokens are given
    checksum: int = 0  # XXH3 of columns, length and stamps
    interrupted: Count = 0  # number of weight updates that interrupted it
    stop_reason: StopReason | None = None
    engines: Writers = ()  # engines that sampled the L tokens; empty if the tokens are given, or none is recorded
    parent: int | None = None  # index of the segment that it follows, or PROMPT, or NOTHING; None: the previous segment
    cause: str = ""  # reason for a branch starting here; else empty
    reward: float | None = None  # reward of this turn, if the workflow gives one per turn

    @classmethod
    def of(
        cls,
        token_ids: Sequence[int] = (),
        behavior_logprobs: Sequence[float] = (),
        versions: Sequence[int] = (),
        interrupted: int = 0,
        stop_reason: StopReason | None = None,
        engines: Writers = (),
        parent: int | None = None,
        cause: str = "",
        reward: float | None = None,
    ) -> Segment:
        """Make a segment from unpacked tokens: pack them and compute their checksum. Log-probabilities and versions are
        one per token, or both empty for given (not sampled) tokens. The other fields are stored as they are given
        (`stop_reason` None: not ended; `parent` None: the preceding segment).

        Raises:
            ValueError: the numbers of log-probabilities and of versions are not both that of the tokens, nor both 0.
            OverflowError: a token id has more than 31 bits.
        """
        if not len(versions) == len(behavior_logprobs) in (0, len(token_ids)):
            told = f"{len(behavior_logprobs)} log-probabilities and {len(versions)} versions"
            raise ValueError(f"{len(token_ids)} tokens have {told}")
        columns, stamps = packed.pack(token_ids, behavior_logprobs), packed.stamps_of(versions)
        sealed = cls.sealed(columns, len(token_ids), stamps, interrupted, stop_reason)
        return msgspec.structs.replace(sealed, engines=engines, parent=parent, cause=cause, reward=reward)

    @classmethod
    def sealed(
        cls,
        columns: bytes,
        length: int,
        stamps: Stamps,
        interrupted: int = 0,
        stop_reason: StopReason | None = None,
    ) -> Segment:
        """Make a segment of `length` tokens from packed `columns` (`core.columns`), and compute its checksum.
        `interrupted`: number of weight updates that interrupted it. `stop_reason`: None: it is unfinished."""
        return cls(columns, length, stamps, packed.checksum(columns, length, stamps), interrupted, stop_reason)

    @property
    def intact(self) -> bool:
        """Whether the checksum matches and the columns hold exactly `length` tokens."""
        columns, length, stamps = self.columns, self.length, self.stamps
        return self.checksum == packed.checksum(columns, length, stamps) and packed.are_whole(columns, length, stamps)

    @property
    def token_ids(self) -> tuple[int, ...]:
        """[L] token ids."""
        return packed.ids_of(self.columns, self.length)

    @property
    def behavior_logprobs(self) -> tuple[float, ...]:
        """[L] log-probabilities at sampling, in nats; empty if the tokens are given."""
        return packed.logprobs_of(self.columns, self.length)

    @property
    def versions(self) -> tuple[int, ...]:
        """[L] policy versions that sampled the tokens, never decreasing; empty if the tokens are given."""
        return packed.versions_of(self.stamps)

    @property
    def sampled(self) -> bool:
        return bool(self.stamps)

    @property
    def sampled_length(self) -> int:
        """Number of sampled tokens."""
        return self.length if self.stamps else 0

    @property
    def writers(self) -> Writers:
        """The field `engines`; if it is empty, all tokens count for the unrecorded engine ""."""
        return self.engines or ((("", self.length),) if self.length else ())

    def __add__(self, other: Segment) -> Segment:
        """Join two consecutive pieces of one completion, as `whole` does."""
        return self.whole((self, other))

    @classmethod
    def whole(cls, pieces: Sequence[Segment]) -> Segment:
        """Join consecutive pieces of one completion (at least one), copying every token once. The stop reason is the
        last piece's; parent, cause and reward are the first piece's; `interrupted` is the largest of all."""
        columns = packed.joined([(piece.columns, piece.length) for piece in pieces])
        stamps = packed.counts_joined([piece.stamps for piece in pieces])
        length = sum([piece.length for piece in pieces])
        written = any(piece.engines for piece in pieces)
        engines = packed.counts_joined([piece.writers for piece in pieces]) if written else ()
        interrupted = max([piece.interrupted for piece in pieces])
        sealed = cls.sealed(columns, length, stamps, interrupted, pieces[-1].stop_reason)
        first = pieces[0]
        return msgspec.structs.replace(
            sealed, engines=engines, parent=first.parent, cause=first.cause, reward=first.reward
        )

    def after(self, tokens: int) -> Segment:
        """The segment without its first `tokens` tokens; empty if it has no more. Other fields are kept."""
        if not tokens:
            return self
        columns, stamps = packed.rest(self.columns, self.length, tokens), packed.after(self.stamps, tokens)
        length = max(0, self.length - tokens)
        return msgspec.structs.replace(
            self,
            columns=columns,
            length=length,
            stamps=stamps,
            checksum=packed.checksum(columns, length, stamps),
            engines=packed.after(self.engines, tokens),
        )

    def begins_with(self, prefix: Segment) -> bool:
        """Whether this segment starts with all token ids of `prefix`."""
        return packed.begin_alike(self.columns, self.length, prefix.columns, prefix.length)

    def written_by(self, engine: str) -> Segment:
        """The tokens as an unfinished segment sampled by `engine`. Of the other fields only `interrupted` is kept."""
        written = ((engine, self.length),) if self.length else ()
        return Segment(self.columns, self.length, self.stamps, self.checksum, self.interrupted, engines=written)


#: Tokens of unfinished completions, by request id, then by member index.
Partials = dict[str, dict[int, Segment]]


class GenerateRequest(Record, frozen=True):
    """One prompt, and a seed for each completion to sample. Member k, the k-th completion, draws all its randomness
    from ``seeds[k]``.

    `prefixes`: empty, or for each member the unfinished segment to continue (of length 0 to start anew).

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

    Each token of its segment has the policy version whose weights sampled it, and its log-probability under exactly
    that version (AReaL, section 4.1: the behaviour policy is logged token by token).

    Example: three tokens, weights switched before the third::

        Completion("0.17.0", 1, Segment.of((4, 4, 2), (-0.1, -0.7, -0.02), (6, 6, 7), 1, StopReason.STOP))
    """

    request: str
    member: int
    segment: Segment  # sampled, with a stop reason
    top_logprobs: tuple[Likeliest, ...] = ()  # [L], () for tokens of a prefix; empty if not requested

    def __post_init__(self) -> None:
        if self.segment.stop_reason is None:
            raise ValueError(f"completion {self.request}/{self.member} has no end")

    @property
    def token_ids(self) -> tuple[int, ...]:
        """[L] token ids."""
        return self.segment.token_ids

    @property
    def behavior_logprobs(self) -> tuple[float, ...]:
        """[L] log-probabilities at sampling, in nats."""
        return self.segment.behavior_logprobs

    @property
    def versions(self) -> tuple[int, ...]:
        """[L] policy versions that sampled the tokens, never decreasing."""
        return self.segment.versions

    @property
    def stop_reason(self) -> StopReason:
        assert self.segment.stop_reason is not None
        return self.segment.stop_reason

    @property
    def interrupted(self) -> int:
        """Number of weight updates that interrupted the completion."""
        return self.segment.interrupted

    @property
    def engines(self) -> Writers:
        """Engines that sampled the tokens (`Segment.engines`)."""
        return self.segment.engines

    def written_by(self, engine: str, prefix: Segment) -> Completion:
        """A copy that records `engine` as the sampler of all tokens after `prefix`, whose engines are kept."""
        whole, new = self.segment, self.segment.length - prefix.length
        written = ((engine, new),) if new > 0 else ()
        engines = packed.counts_joined([prefix.writers, written]) if prefix.length else written
        sealed = (whole.columns, whole.length, whole.stamps, whole.checksum, whole.interrupted, whole.stop_reason)
        return Completion(self.request, self.member, Segment(*sealed, engines), self.top_logprobs)


class Verdict(Record, frozen=True):
    """Judgement of one completion. `reward` is None if and only if the outcome is undecided. `rewards`: the unweighted
    parts of the reward by name; empty if it has no named parts."""

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
    """A prompt's completion with its verdict: the unit of the buffer and of training. `text`: its tokens, decoded.

    A single turn is one sampled segment; further turns alternate given and sampled segments, and an agent's session may
    branch. Only sampled tokens are in the loss, each once.

    Example: ``Trajectory(id="0.17.0/3", segments=(Segment(...),), verdict=..., text="9")``
    """

    id: str
    segments: tuple[Segment, ...]
    verdict: Verdict
    text: str
    session: str = ""  # name of the agent's session; "" if the trajectory is not from a session

    @property
    def member(self) -> int:
        """Index of the trajectory in its group."""
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

    @property
    def sampled_length(self) -> int:
        """S, the number of sampled tokens."""
        return sum([segment.sampled_length for segment in self.segments])

    def _joined(self, field: str) -> tuple[Any, ...]:
        return tuple(chain.from_iterable(getattr(segment, field) for segment in self.segments))

    @property
    def stop_reason(self) -> StopReason | None:
        """Stop reason of the last segment that has one; None if none has."""
        if len(self.segments) == 1:
            return self.segments[0].stop_reason
        return next((segment.stop_reason for segment in reversed(self.segments) if segment.stop_reason), None)

    @property
    def interrupted(self) -> int:
        """Number of weight updates that interrupted its segments, summed."""
        return sum([segment.interrupted for segment in self.segments])

    @property
    def reward(self) -> float:
        """The reward of a decided trajectory. Raises ValueError if the verdict is undecided; such a trajectory should
        have been failed."""
        if self.verdict.reward is None:
            raise ValueError(f"trajectory {self.id} is undecided ({self.verdict.reason}) and has no reward")
        return self.verdict.reward


class Group(Record, frozen=True):
    """Completions of one prompt that have a reward; undecided and filtered ones are left out. All were admitted
    together, at one version. `max_staleness`: staleness bound at the admission; inf if unknown.

    Example: ``Group(id="0.17.0", prompt=..., admitted_version=6, trajectories=(<8 of them>))``
    """

    id: str
    prompt: Prompt
    admitted_version: int
    trajectories: tuple[Trajectory, ...]
    max_staleness: float = math.inf

    @property
    def oldest_version(self) -> int:
        """The oldest version that sampled any token of the group; that of its admission if no token was sampled."""
        sampled = [segment.stamps for trajectory in self.trajectories for segment in trajectory.segments]
        return min([stamps[0][0] for stamps in sampled if stamps], default=self.admitted_version)


class Batch(Record, frozen=True):
    """Input of one training step: B groups that update the policy `version`. The step publishes ``version + 1``.

    Tokens sampled by versions older than `oldest_trainable` are context, not in the loss (``beyond_bound = "mask"``).
    `oldest_by_group` replaces `oldest_trainable` for groups admitted under a stricter bound, by group id.
    """

    step: int
    version: int
    groups: tuple[Group, ...]
    oldest_trainable: int = 0
    oldest_by_group: Mapping[str, int] = {}

    def oldest_of(self, group: str) -> int:
        """Oldest version whose tokens are in the loss for the group with this id."""
        return self.oldest_by_group.get(group, self.oldest_trainable)


class Update(Record, frozen=True):
    """Result of a training step: the published version and its metrics (docs/reference/metrics.md).

    `trained_tokens`, `masked_tokens`: sampled tokens of the batch in the loss, and left out of it. `skipped`: ids of
    the trajectories of optimizer steps that were skipped because of a non-finite gradient.
    """

    step: int
    version: int
    trained_tokens: int
    masked_tokens: int
    metrics: dict[str, float]
    skipped: tuple[str, ...] = ()


def trajectory_id(group: str, member: int) -> str:
    """Id of a trajectory: ``"0.17.0/3"`` is epoch 0, prompt 17, first attempt, fourth completion."""
    return f"{group}/{member}"


def derive_seed(*parts: int | str) -> int:
    """A 63-bit seed computed from `parts` by a hash; equal on every machine.

    >>> derive_seed(1, "0.17.0/3") == derive_seed(1, "0.17.0/3") != derive_seed(2, "0.17.0/3")
    True
    """
    text = "\x1f".join(str(part) for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1
