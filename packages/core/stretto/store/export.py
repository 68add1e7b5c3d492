"""Export of a run: every trajectory as one row, in a common file format."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from itertools import accumulate, groupby, pairwise
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from stretto.core.records import Record, Segment
from stretto.store.files import users_file
from stretto.store.folder.run_folder import RunFolder
from stretto.store.formats.parquet import Parquet
from stretto.store.formats.text import Csv, JsonLines
from stretto.store.ledger.rows import Payload, decode_payload
from stretto.store.ledger.schema import reading
from stretto.store.ledger.seals import check_rows
from stretto.store.series.lines import iterate_lines

#: Named here, not by SQLite: a flipped bit in the schema may change the case of a name.
_NAMES: tuple[str, ...] = (
    "id",
    "group",
    "prompt_id",
    "prompt_token_ids",
    "payload",
    "interrupted",
    "reward",
    "verdict",
    "state",
)
_NAMES += ("reason", "admitted_version", "trained_step", "stop_reason")
_ROWS = """
    SELECT groups.id || '/' || member, groups.id, prompt_id, prompt_token_ids, payload, interrupted, reward, verdict,
        state, reason, admitted_version, trained_step, stop_reason
    FROM trajectories JOIN groups ON groups.key = group_key LEFT JOIN payloads USING (key)
    ORDER BY trajectories.key
"""
_NO_PAYLOAD = Payload(segments=(), text="")


class ExportedSegment(Record, frozen=True, omit_defaults=True):
    """Consecutive tokens of one origin (sampled or given). `parent`: index of the segment before it, -1 for the prompt,
    -2 for none; left out if it is the preceding one. `cause` and `reward` are left out if there is none."""

    sampled: bool
    token_ids: tuple[int, ...]
    behavior_logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    parent: int | None = None
    cause: str = ""
    reward: float | None = None


class ExportedTrajectory(Record, frozen=True):
    """One row. `token_ids` are those of all segments, concatenated; log-probabilities and versions are those of the
    sampled tokens. `given`: spans of `token_ids` that were given, not sampled. `engines`: the engines that sampled
    tokens, in order. Token fields are empty if nothing was sampled, or ``store.keep_payloads`` kept none."""

    id: str
    group: str
    prompt_id: str
    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    behavior_logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    given: tuple[tuple[int, int], ...]
    engines: tuple[str, ...]
    reward: float | None
    verdict: str | None
    state: str
    reason: str
    admitted_version: int
    trained_step: int | None
    stop_reason: str | None
    text: str
    prompt: str | None = None  # None: the run has no record of its questions
    answer: str | None = None  # the gold answer
    row: str | None = None  # FILE:LINE of the question, where it is a row of a file
    source: str = ""  # the name of the source that the question is from, in a task of several
    segments: tuple[ExportedSegment, ...] = ()
    rewards: Mapping[str, float] = {}  # the named parts of the reward, before their weights
    session: str = ""  # the name of the agent's session that it was, if it was one


class ExportedQuestion(Record, frozen=True):
    """One line of ``questions.jsonl``: a prompt and its gold answer."""

    id: str
    prompt: str
    answer: str
    row: str | None = None
    source: str = ""


_QUESTIONS = msgspec.json.Decoder(ExportedQuestion)


#: By its name, which is also the suffix of its files.
FORMATS: Mapping[str, Callable[[BinaryIO, type[msgspec.Struct]], JsonLines | Parquet | Csv]] = {
    "jsonl": JsonLines,
    "parquet": Parquet,
    "csv": Csv,
}


def read_trajectories(path: str | Path) -> Iterator[ExportedTrajectory]:
    """Read all trajectories of a run in the order of their issue, one at a time.

    Raises:
        RunFolderError: there is no run.
        StoreError: its ledger cannot be read, or is damaged.
    """
    folder = RunFolder.open(path)
    with _questions(folder.questions) as question_of, reading(folder.ledger) as connection:
        check_rows(connection, folder.ledger)
        for row in connection.execute(_ROWS):
            columns = dict(zip(_NAMES, row, strict=True))
            yield _exported(columns, question_of(columns["prompt_id"]))


def export_run(path: str | Path, file: str | Path, format: str | None = None) -> int:
    """Write all trajectories of a run to `file`, one per row; returns their number. The file is complete or absent.

    Args:
        format: one of `FORMATS`; None: that of the file's suffix, else JSON lines.

    Raises:
        RunFolderError: there is no run, or `file` cannot be written or is no regular file.
        UserError: the format needs a package that is missing.
        StoreError: the ledger cannot be read, or is damaged.
    """
    target = Path(file)
    suffix = target.suffix.removeprefix(".").lower()
    with users_file(target) as output:
        return write_trajectories(path, output, format or (suffix if suffix in FORMATS else "jsonl"))


def write_trajectories(path: str | Path, output: BinaryIO, format: str) -> int:
    """Write all trajectories of a run to an open file, as `export_run` does."""
    count = 0
    with closing(FORMATS[format](output, ExportedTrajectory)) as writer:
        for trajectory in read_trajectories(path):
            writer.write(trajectory)
            count += 1
    return count


@contextmanager
def _questions(path: Path) -> Iterator[Callable[[str], ExportedQuestion | None]]:
    """Lookup of a run's questions by id, in a temporary SQLite file that vanishes when closed: they may exceed memory.

    Raises:
        StoreError: a line cannot be read.
    """
    with closing(sqlite3.connect("", isolation_level=None)) as table:
        table.execute("CREATE TABLE questions (id TEXT PRIMARY KEY, question BLOB) WITHOUT ROWID")
        table.execute("BEGIN")
        rows = ((question.id, msgspec.json.encode(question)) for question in iterate_lines(path, _QUESTIONS))
        table.executemany("INSERT OR REPLACE INTO questions VALUES (?, ?)", rows)

        def find(id: str) -> ExportedQuestion | None:
            found = table.execute("SELECT question FROM questions WHERE id = ?", (id,)).fetchone()
            return None if found is None else _QUESTIONS.decode(found[0])

        yield find


def _exported(columns: dict[str, Any], question: ExportedQuestion | None) -> ExportedTrajectory:
    sealed, interrupted, prompt = (columns.pop(name) for name in ("payload", "interrupted", "prompt_token_ids"))
    outcome = (columns["verdict"], columns["reward"], columns["stop_reason"], interrupted)
    payload = _NO_PAYLOAD if sealed is None else decode_payload(columns["id"], outcome, sealed)
    fields = columns | {
        "prompt_token_ids": () if prompt is None else msgspec.msgpack.decode(prompt),
        "token_ids": [token for segment in payload.segments for token in segment.token_ids],
        "behavior_logprobs": [logprob for segment in payload.segments for logprob in segment.behavior_logprobs],
        "versions": [version for segment in payload.segments for version in segment.versions],
        "given": _given(payload.segments),
        "engines": [name for name, _ in groupby(_writers(payload.segments))],
        "text": payload.text,
        "segments": [_segment(segment) for segment in payload.segments],
        "rewards": payload.rewards,
        "session": payload.session,
    }
    if question is not None:
        fields |= {"prompt": question.prompt, "answer": question.answer, "row": question.row, "source": question.source}
    return msgspec.convert(fields, ExportedTrajectory)


def _segment(segment: Segment) -> ExportedSegment:
    columns = (segment.token_ids, segment.behavior_logprobs, segment.versions)
    return ExportedSegment(segment.sampled, *columns, segment.parent, segment.cause, segment.reward)


def _given(segments: tuple[Segment, ...]) -> list[tuple[int, int]]:
    ends = list(accumulate((segment.length for segment in segments), initial=0))
    return [span for span, segment in zip(pairwise(ends), segments, strict=True) if not segment.sampled]


def _writers(segments: tuple[Segment, ...]) -> list[str]:
    return [name for segment in segments for name, _ in segment.engines if name]
