"""Export of a run: each trajectory is one row of a JSON-lines, parquet or CSV file."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from itertools import accumulate, groupby, pairwise
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from stretto.core.errors import Problem, RunFolderError, nearest
from stretto.core.records import Record, Segment
from stretto.store.files import users_file
from stretto.store.ledger.rows import Payload, decode_payload
from stretto.store.ledger.schema import at_rest, reading_on
from stretto.store.ledger.seals import check_rows
from stretto.store.run_folder import ExportedQuestion, RunFolder
from stretto.store.series.lines import iterate_lines
from stretto_report.reading.formats import FORMATS

#: Names of the columns of `_ROWS`. SQLite's own names are not used: a flipped bit in the schema may change a letter.
_NAMES: tuple[str, ...] = ("id", "group", "prompt_id", "prompt_token_ids", "payload", "interrupted", "reward")
_NAMES += ("verdict", "state", "reason", "admitted_version", "trained_step", "stop_reason")
_ROWS = """
    SELECT trajectories.key, groups.id || '/' || member, groups.id, prompt_id, prompt_token_ids, payload, interrupted,
        reward, verdict, state, reason, admitted_version, trained_step, stop_reason
    FROM trajectories JOIN groups ON groups.key = group_key LEFT JOIN payloads USING (key)
    WHERE trajectories.key > ? ORDER BY trajectories.key
"""
#: Most rows, and bytes of tokens, that are read at a time.
_PORTION, _PORTION_BYTES = 32, 4 << 20
_NO_PAYLOAD = Payload(segments=(), text="")


class ExportedSegment(Record, frozen=True, omit_defaults=True):
    """Consecutive tokens of a trajectory that are all sampled, or all given (not sampled: a tool's output, a user's
    turn). A given segment has no log-probabilities and no versions.

    `parent`: index of the segment that these tokens follow; -1: the prompt; -2: nothing; None (left out of the file):
    the preceding segment. `cause`: why a new branch began here; "": none did. `reward`: of this segment alone; None: it
    has none.
    """

    sampled: bool
    token_ids: tuple[int, ...]
    behavior_logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    parent: int | None = None
    cause: str = ""
    reward: float | None = None


class ExportedTrajectory(Record, frozen=True):
    """One trajectory, as a row of the export.

    `token_ids`: of all segments, concatenated. `behavior_logprobs` and `versions`: one number per sampled token.
    `given`: spans (start, end) of `token_ids` that were given, not sampled. `engines`: names of the engines that
    sampled tokens, in order. Fields of tokens are empty if nothing was sampled, or if ``store.keep_payloads`` did not
    keep them.

    `reward`, `verdict`: None: not judged; `reward` also: undecided. `trained_step`: None: not trained on.
    `stop_reason`: None: no completion has ended. `prompt`, `answer` (the gold answer), `row` (FILE:LINE of the
    question, if it is a row of a file): None: not on record. `source`: name of the question's source, if the task has
    several. `rewards`: with several rewards, the value of each, by name, before its weight. `session`: name of the
    agent's session that made the trajectory; "": none.
    """

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
    prompt: str | None = None
    answer: str | None = None
    row: str | None = None
    source: str = ""
    segments: tuple[ExportedSegment, ...] = ()
    rewards: Mapping[str, float] = {}
    session: str = ""


_QUESTIONS = msgspec.json.Decoder(ExportedQuestion)
_OTHER_JSON = ("", "json", "jsonlines", "ndjson")  # further suffixes of JSON lines


def format_of(file: str | Path) -> str:
    """Return the format of a file by its suffix: one of `FORMATS`. JSON lines for ``json``, ``ndjson`` and no suffix.

    >>> format_of("rows.parquet"), format_of("rows")
    ('parquet', 'jsonl')

    Raises:
        RunFolderError: the suffix is that of no format ("xlsx").
    """
    suffix = Path(file).suffix.removeprefix(".").lower()
    if suffix in FORMATS:
        return suffix
    if suffix not in _OTHER_JSON:
        remedy = f"{nearest(suffix, FORMATS)}; --format writes a format under any name"
        raise RunFolderError([Problem(str(file), f"{suffix!r} is no suffix of a format", remedy)])
    return "jsonl"


def read_trajectories(path: str | Path) -> Iterator[ExportedTrajectory]:
    """Read all trajectories of the run in the folder `path`, one at a time, in the order of their issue. Of a running
    run, each is as it was when it was read.

    Raises (from the first ``next``, not from the call):
        RunFolderError: the folder holds no run.
        StoreError: the ledger cannot be read, or is damaged; a trajectory's damaged tokens are found when it is read.
    """
    folder = RunFolder.open(path)
    with _questions(folder.questions) as question_of:
        for portion in _portions(folder.ledger):
            for _, *row in portion:
                columns = dict(zip(_NAMES, row, strict=True))
                yield _exported(columns, question_of(columns["prompt_id"]))


def _portions(ledger: Path) -> Iterator[list[tuple[Any, ...]]]:
    """Yield all rows of the ledger, some at a time. If a run begins to write, it is opened again, and read on behind
    the last row."""
    key, is_whole = -1, False
    while not is_whole:
        resting = at_rest(ledger)
        with reading_on(ledger) as connection:
            check_rows(connection, ledger)
            connection.execute("COMMIT")
            while (portion := _portion(connection, key)) and (not resting or resting == at_rest(ledger)):
                key = portion[-1][0]
                yield portion
            is_whole = not portion and (not resting or resting == at_rest(ledger))


def _portion(connection: sqlite3.Connection, key: int) -> list[tuple[Any, ...]]:
    """Return the next rows after the ledger key: at most 32, or as many as hold about 4 MiB of tokens; empty at the
    end. The SQL cursor is closed before the rows are used: while a reader is within a statement, the run cannot move
    its write-ahead log into the ledger file, and the reader of an export may pause for hours."""
    rows, size = list[tuple[Any, ...]](), 0
    with closing(connection.execute(_ROWS, (key,))) as found:
        for row in found:
            rows.append(row)
            size += len(row[1 + _NAMES.index("payload")] or b"")
            if len(rows) >= _PORTION or size >= _PORTION_BYTES:
                break
    return rows


def export_run(path: str | Path, file: str | Path, format: str | None = None) -> int:
    """Write all trajectories of the run in the folder `path` to `file`, one per row, and return their number. An
    existing file is replaced. After an error, the file is as it was before.

    Args:
        format: one of `FORMATS`; None: the format of the file's suffix (`format_of`).

    Raises:
        RunFolderError: there is no run, or `file` cannot be written, is no regular file, is a record of a run, or has
            the suffix of no format.
        UserError: the format needs a package that is missing.
        StoreError: the ledger cannot be read, or is damaged.
    """
    format = format or format_of(file)
    with users_file(Path(file)) as output:
        return write_trajectories(path, output, format)


def write_trajectories(path: str | Path, output: BinaryIO, format: str) -> int:
    """Write all trajectories of the run in the folder `path` to the open file `output`, and return their number.
    `format`: one of `FORMATS`.

    Raises:
        RunFolderError: there is no run.
        UserError: the format needs a package that is missing.
        StoreError: the ledger cannot be read, or is damaged.
    """
    count = 0
    with closing(FORMATS[format](output, ExportedTrajectory)) as writer:
        for trajectory in read_trajectories(path):
            writer.write(trajectory)
            count += 1
    return count


@contextmanager
def _questions(path: Path) -> Iterator[Callable[[str], ExportedQuestion | None]]:
    """Context manager: yield a function that returns the question with an id; None: the run has no record of it. The
    questions are held in a temporary SQLite database on disk: they may exceed memory. Raises StoreError for a line that
    cannot be read."""
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
        "engines": [
            name for name, _ in groupby(name for segment in payload.segments for name, _ in segment.engines if name)
        ],
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
