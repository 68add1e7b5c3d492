"""Data of the pages of one trajectory (tokens, their outcomes, its life cycle) and of its group."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import accumulate, pairwise
from pathlib import Path

import msgspec
import numpy as np

from stretto.core.errors import StoreError, several
from stretto.core.records import Record, Segment, State
from stretto.store.ledger.partials import read_member
from stretto.store.ledger.rows import Payload, decode_payload
from stretto_report.watch.index.files import read_ledger
from stretto_report.watch.index.trajectories import Trajectories
from stretto_report.watch.runs.pieces import Pieces
from stretto_report.watch.runs.questions import PromptTexts
from stretto_report.watch.runs.table import Table, TableRow
from stretto_report.watch.runs.training import TrainedIn, Training, TrainingSums, mean_advantages, trained_in
from stretto_workflows.chat.tool_calls import form_of

LONGEST_TEXT = 20_000  #: most characters of a text in a reply
LONGEST_OF_MEMBER = 4_000  #: the same, for each completion of a group
MOST_TOKENS = 20_000  #: most tokens in a reply
_LARGEST_CALLS = 200_000  # most characters of a segment that is searched for tool calls
_GROUP = "SELECT key, prompt_token_ids FROM groups WHERE id = ?"
_PAYLOAD = """
    SELECT verdict, reward, stop_reason, interrupted, payload FROM trajectories LEFT JOIN payloads USING (key)
    WHERE trajectories.key = ?
"""


class _WrittenCall(Record, frozen=True):
    """A tool call that the model wrote in a completion. `arguments`: JSON text."""

    name: str
    arguments: str


class TokenColumns(Record, frozen=True):
    """Tokens of a segment as columns of equal length. A column that was not recorded is None, and so is a value that is
    not known. `text`: piece of text of each token. `staleness`: versions until the step that trained it. `logprob`: of
    the engine; `difference`: that of the trainer minus that of the engine. `fate`: see `Training.fates`."""

    id: list[int]
    text: list[str]
    version: list[int] | None
    staleness: list[int] | None
    logprob: list[float] | None
    trainer_logprob: list[float | None] | None
    difference: list[float | None] | None
    ratio: list[float | None] | None
    advantage: list[float | None] | None
    fate: list[str]


class ShownSegment(Record, frozen=True):
    """A segment with its `tokens` in the requested window. `index`: of the segment; `length`: its number of tokens;
    `offset`: index of its first token in the trajectory. `role`: "assistant" if its tokens are `sampled`, else "given".
    `parent`, `cause`, `reward`: as in `ExportedSegment`. `stop_reason`: None: given, or not ended. `engines`: names
    with numbers of tokens. `interrupted`: how often a load of weights interrupted it. `calls`: tool calls in a sampled
    segment, if the window has its beginning."""

    index: int
    role: str
    sampled: bool
    parent: int | None
    cause: str
    stop_reason: str | None
    reward: float | None
    engines: tuple[tuple[str, int], ...]
    interrupted: int
    length: int
    offset: int
    calls: list[_WrittenCall]
    tokens: TokenColumns


class LifeEvent(Record, frozen=True):
    """Event in the life of a trajectory. `event`: its kind ("admitted", "begun", "trained", ...); `text`: a sentence.
    `token`: index of the token at which it happened; `at`: Unix time. Fields that do not apply, or were not recorded,
    are None."""

    event: str
    text: str
    version: int | None = None
    token: int | None = None
    step: int | None = None
    engine: str | None = None
    at: float | None = None


class _Cut(Record, frozen=True):
    """Window of tokens, from `offset` to `offset + limit`. `more`: whether tokens follow it."""

    offset: int
    limit: int
    more: bool


class _PromptTokens(Record, frozen=True):
    """First tokens of a prompt: their ids and pieces of text."""

    id: list[int]
    text: list[str]


class _Detail(TableRow, frozen=True, rename={"members": "siblings"}):
    """A row of the table with all records of the trajectory. `prompt_cut`, `text_cut`: whether `prompt_text` and `text`
    are cut. `tokens`: number of all its tokens; those of `segments` are the ones in the window `cut`. `training_fault`:
    why there is no record of its tokens' training (`training`); "": there is, or it was not trained. `members` (in JSON
    ``siblings``): ids of the trajectories of its group, itself included. `session`: name of the agent's session; "":
    none. Texts that are not on record are None; `answer` too is cut at `LONGEST_TEXT`."""

    prompt_text: str | None
    prompt_cut: bool
    answer: str | None
    text: str
    text_cut: bool
    prompt_tokens: _PromptTokens
    prompt_length: int
    rewards: dict[str, float]
    session: str
    tokens: int
    cut: _Cut
    segments: list[ShownSegment]
    training: TrainingSums | None
    training_fault: str
    life: list[LifeEvent]
    members: list[str]


class _GroupMember(TableRow, frozen=True):
    """A completion on the page of its group. `text_cut`: whether `text` is cut. `advantage`: mean over its tokens in
    the loss; None if that is not on record."""

    text: str
    text_cut: bool
    advantage: float | None


class ShownGroup(Record, frozen=True):
    """A group: a prompt with all completions of one attempt. `prompt`, `answer`: None if not on record. `mean_reward`:
    of the judged completions; None if there is none."""

    group: str
    prompt_id: str
    prompt: str | None
    answer: str | None
    admitted_version: int
    mean_reward: float | None
    members: list[_GroupMember]


class Reader:
    """Reader of single trajectories and groups of the run in `folder`, among those that `trajectories` has read.
    `table`: pages of all of them."""

    def __init__(self, folder: Path, trajectories: Trajectories, questions: PromptTexts, pieces: Pieces) -> None:
        self._folder, self._trajectories, self._questions = folder, trajectories, questions
        self.table, self._pieces = Table(folder, trajectories, questions), pieces

    def trajectory(self, id: str, offset: int, limit: int, skipped: dict[int, tuple[str, ...]]) -> _Detail | None:
        """Return everything recorded of the trajectory `id` (``GROUP/MEMBER``); None if it is unknown, or not read yet.

        Args:
            offset: index of the first token to return, of all segments.
            limit: most tokens of the segments, and most tokens of the prompt, to return.
            skipped: ids of the trajectories whose optimizer step was skipped, by step.

        Raises:
            StoreError: the trajectory's record is damaged, or the ledger cannot be read.
        """
        group, _, member = id.rpartition("/")
        with read_ledger(self._folder) as connection:
            found = connection.execute(_GROUP, (group,)).fetchone()
            if found is None or not member.isdecimal() or len(member) > 9:
                return None
            key, prompt = found[0] + int(member), _prompt(found[1])
            places = self._places(found[0])
            at = [place for place in places.tolist() if self._trajectories.table["key"][place] == key]
            if not at:
                return None
            (row,) = self.table.rows(np.array(at))
            payload = self._payload(connection, row, key)
            trained = trained_in(connection, row, skipped)
        training = Training.of(self._folder, row, trained, payload.segments)
        question = self._questions.find([row.prompt_id]).get(row.prompt_id)
        asked = question.prompt if question is not None else None
        return _Detail(
            **msgspec.structs.asdict(row),
            prompt_text=None if asked is None else asked[:LONGEST_TEXT],
            prompt_cut=asked is not None and len(asked) > LONGEST_TEXT,
            answer=None if question is None else question.answer[:LONGEST_TEXT],
            text=payload.text[:LONGEST_TEXT],
            text_cut=len(payload.text) > LONGEST_TEXT,
            prompt_tokens=_PromptTokens(list(prompt[:limit]), self._pieces.of(prompt[:limit])),
            prompt_length=len(prompt),
            rewards=dict(payload.rewards),
            session=payload.session,
            tokens=(total := sum(segment.length for segment in payload.segments)),
            cut=_Cut(offset, limit, offset + limit < total),
            segments=list(self._segments(payload.segments, training, offset, offset + limit)),
            training=training.sums,
            training_fault=training.fault,
            life=list(life(row, payload.segments, trained)),
            members=[one.id for one in self.table.rows(places)],
        )

    def group(self, id: str) -> ShownGroup | None:
        """Return all completions of the group `id`; None if it is unknown, or not read yet. Raises StoreError if a
        record is damaged, or the ledger cannot be read."""
        with read_ledger(self._folder) as connection:
            found = connection.execute(_GROUP, (id,)).fetchone()
            places = self._places(found[0]) if found is not None else ()
            if not len(places):
                return None
            rows = self.table.rows(np.array(places))
            texts = [self._payload(connection, row, found[0] + row.member).text for row in rows]
        question = self._questions.find([rows[0].prompt_id]).get(rows[0].prompt_id)
        rewards = [row.reward for row in rows if row.reward is not None]
        advantages = mean_advantages(self._folder, rows)
        return ShownGroup(
            group=id,
            prompt_id=rows[0].prompt_id,
            prompt=None if question is None else question.prompt[:LONGEST_TEXT],
            answer=None if question is None else question.answer[:LONGEST_TEXT],
            admitted_version=rows[0].admitted_version,
            mean_reward=sum(rewards) / len(rewards) if rewards else None,
            members=[
                _GroupMember(
                    **msgspec.structs.asdict(row),
                    text=text[:LONGEST_OF_MEMBER],
                    text_cut=len(text) > LONGEST_OF_MEMBER,
                    advantage=advantages.get(row.id),
                )
                for row, text in zip(rows, texts, strict=True)
            ],
        )

    def _places(self, group_key: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        keys = self._trajectories.table["key"]
        begin = int(np.searchsorted(keys, group_key))
        end = begin
        while end < len(keys) and self._trajectories.table["group_key"][end] == group_key:
            end += 1
        return np.arange(begin, end)

    def _payload(self, connection: sqlite3.Connection, row: TableRow, key: int) -> Payload:
        """Return segments and text of the trajectory with the ledger key `key`; for one in flight, what was journaled
        so far, with the text of at most `LONGEST_TEXT` tokens. Empty if its tokens were not kept. Raises StoreError if
        it is not on record or damaged."""
        found = connection.execute(_PAYLOAD, (key,)).fetchone()
        if found is None:
            raise StoreError(f"trajectory {row.id} is not on record")
        *columns, sealed = found
        if sealed is not None:
            return decode_payload(row.id, tuple(columns), sealed)
        (number,) = connection.execute("PRAGMA user_version").fetchone()
        if number < 3 or row.state != State.IN_FLIGHT:
            return Payload(segments=(), text="")
        segments = read_member(connection, row.id, key, number).segments
        tokens = [token for segment in segments for token in segment.token_ids]
        return Payload(segments=segments, text=self._pieces.text(tokens[:LONGEST_TEXT]))

    def _segments(
        self, segments: Sequence[Segment], training: Training, first: int, last: int
    ) -> Iterator[ShownSegment]:
        """Yield the segments that overlap the tokens `first` to `last` (excluded) of the trajectory, or end at `first`,
        each with its tokens in that window."""
        begins = accumulate((segment.length for segment in segments), initial=0)
        sampled = accumulate((segment.sampled_length for segment in segments), initial=0)
        for index, (segment, begin, own) in enumerate(zip(segments, begins, sampled, strict=False)):
            end = begin + segment.length
            if end < first or begin >= last:
                continue
            window = slice(max(0, first - begin), max(0, last - begin))
            calls = self._calls(segment) if segment.sampled and first <= begin else []
            yield ShownSegment(
                index=index,
                role="assistant" if segment.sampled else "given",
                sampled=segment.sampled,
                parent=segment.parent,
                cause=segment.cause,
                stop_reason=segment.stop_reason,
                reward=segment.reward,
                engines=segment.engines,
                interrupted=segment.interrupted,
                length=segment.length,
                offset=begin,
                calls=calls,
                tokens=self._columns(segment, window, training, own + window.start),
            )

    def _calls(self, segment: Segment) -> list[_WrittenCall]:
        text = self._pieces.text(segment.token_ids[:MOST_TOKENS])
        if len(text) > _LARGEST_CALLS:
            return []
        found = form_of(self._pieces.chat_template).parse(text, lambda number: f"call_{number}").calls
        return [_WrittenCall(call.name, call.arguments) for call in found]

    def _columns(self, segment: Segment, window: slice, training: Training, first: int) -> TokenColumns:
        """Return columns of the tokens in `window`, a slice of the segment. `first`: index of the window's first token
        among all sampled tokens of the trajectory; without meaning for a given segment."""
        ids, versions = segment.token_ids[window], segment.versions[window]
        logprobs, trained = segment.behavior_logprobs[window], training.trained
        numbers = partial(training.numbers, first=first, count=len(ids)) if segment.sampled else lambda _: None
        by_trainer = numbers("trainer_logprob")
        return TokenColumns(
            id=list(ids),
            text=self._pieces.of(ids),
            version=list(versions) if segment.sampled else None,
            staleness=[trained.version - version for version in versions] if segment.sampled and trained else None,
            logprob=list(logprobs) if segment.sampled else None,
            trainer_logprob=by_trainer,
            difference=None if by_trainer is None else _differences(by_trainer, logprobs),
            ratio=numbers("ratio"),
            advantage=numbers("advantage"),
            fate=training.fates(segment, window, first),
        )


def _differences(trainer: Sequence[float | None], engine: Sequence[float]) -> list[float | None]:
    return [None if ours is None else ours - theirs for ours, theirs in zip(trainer, engine, strict=True)]


def life(row: TableRow, segments: Sequence[Segment], trained: TrainedIn | None) -> Iterator[LifeEvent]:
    """Yield the events of a trajectory in order, as far as recorded. `segments`: all of it. `trained`: the step that
    trained it; None: no step has, or it is not on record."""
    yield LifeEvent("admitted", f"admitted at version {row.admitted_version}", version=row.admitted_version)
    begin = 0
    for segment in segments:
        yield from _of_segment(segment, begin)
        begin += segment.length
    if row.verdict is not None:
        reward = "without a reward" if row.reward is None else f"with reward {row.reward:g}"
        yield LifeEvent("judged", f"judged {row.verdict}, {reward}")
    if row.state in (State.BUFFERED, State.TRAINED):
        yield LifeEvent("buffered", "waited for a batch")
    if trained is not None:
        text = f"trained in step {trained.step}, at version {trained.version}"
        text += "; the optimizer step was skipped" if trained.skipped else ""
        yield LifeEvent("trained", text, version=trained.version, step=trained.step, at=trained.committed)
    elif row.state in (State.FILTERED, State.EXPIRED, State.FAILED):
        yield LifeEvent(row.state, f"{row.state}: {row.reason}")


def _of_segment(segment: Segment, begin: int) -> Iterator[LifeEvent]:
    if not segment.sampled:
        return
    ends = [*accumulate(count for _, count in segment.engines)]
    engines = [name or "an engine that is not on record" for name, _ in segment.engines]
    by = f" by {engines[0]}" if engines else ""
    version = segment.stamps[0][0]
    yield LifeEvent(
        "begun", f"begun{by} with version {version}", version, begin, engine=engines[0] if engines else None
    )
    changes = [*pairwise(accumulate((count for _, count in segment.stamps), initial=0))][1:]
    happened = [
        (at, LifeEvent("interrupted", f"went on with version {stamp}", stamp, begin + at))
        for (at, _), (stamp, _) in zip(changes, segment.stamps[1:], strict=True)
    ]
    happened += [
        (at, LifeEvent("moved", f"went on by {name}", token=begin + at, engine=name))
        for at, name in zip(ends, engines[1:], strict=False)
    ]
    yield from (event for _, event in sorted(happened, key=lambda pair: pair[0]))
    if segment.interrupted > len(changes):
        more = segment.interrupted - len(changes)
        yield LifeEvent("interrupted", f"stopped by {several(more, 'more update')} without a token between")
    if segment.stop_reason is not None:
        why = "at its end" if segment.stop_reason == "stop" else "at its length limit"
        yield LifeEvent("ended", f"ended {why}, {several(segment.length, 'token')}", token=begin + segment.length)


def _prompt(packed: bytes | None) -> tuple[int, ...]:
    return () if packed is None else msgspec.msgpack.decode(packed, type=tuple[int, ...])
