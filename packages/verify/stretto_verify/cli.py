"""``stretto-verify math FILE`` and ``stretto-verify code FILE``: verdicts on the lines of a JSONL file."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from stretto_verify.judging import ProgramJudge
from stretto_verify.math.limits import SECONDS
from stretto_verify.verdicts import Judged, SandboxRefused
from stretto_verify.worker import Worker

_SHOWN = 20  # most malformed lines that are listed
_NEEDED = {"math": "gold", "code": "tests"}
_MISTAKE = 2  # exit code of a user's mistake

#: Judges one row of the file.
Judge = Callable[[dict[str, Any]], Judged]


class _BadLines(Exception):
    """Malformed lines of a file, or a file without lines. `problems`: a sentence with file and line number for each of
    the first 20, and one that counts the others."""

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(self.problems))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code: 2 for a mistake in the file or if no sandbox can be made, 1 if nobody
    reads the rest of the output, as behind ``| head``, else 0, whatever the verdicts. `arguments`: None for those of
    the process. Wrong ones end the process with exit code 2."""
    parser = argparse.ArgumentParser("stretto-verify", description="Verdicts on the completions of a JSONL file.")
    parser.add_argument("kind", choices=("math", "code"), help="final answers against `gold`, or programs and `tests`")
    parser.add_argument("file", type=Path, help="one JSON object a line, with `completion` and `gold` or `tests`")
    given = parser.parse_args(arguments)
    try:
        rows = read_rows(given.file, _NEEDED[given.kind])
        with _math() if given.kind == "math" else _code() as judge:
            print_judged(given.file, rows, judge)
    except (_BadLines, SandboxRefused) as mistake:
        print(mistake, file=sys.stderr)
        return _MISTAKE
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what is written at the interpreter's end
        return 1
    return 0


def read_rows(path: Path, needed: str) -> list[tuple[int, dict[str, Any]]]:
    """Line numbers and objects of a JSONL file, without blank lines.

    Raises:
        _BadLines: the file cannot be read or has no rows, or some lines are no objects with a text `completion` and the
            field `needed` ("gold", which must be a text or a number, or "tests").
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise _BadLines([f"{path}: cannot be read: {error}"]) from None
    except UnicodeDecodeError as error:
        number = error.object.count(b"\n", 0, error.start) + 1
        raise _BadLines([f"{path}:{number}: the byte 0x{error.object[error.start]:02x} is no UTF-8"]) from None
    rows, problems = list[tuple[int, dict[str, Any]]](), list[str]()
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            rows.append((number, _row(line, needed)))
        except (ValueError, RecursionError) as error:
            problems.append(f"{path}:{number}: {error}")
    if len(problems) > _SHOWN:
        problems = [*problems[:_SHOWN], f"{path}: lines like these: {len(problems) - _SHOWN:,} more"]
    if not rows and not problems:
        problems = [f"{path}: no rows; at least one is needed"]
    if problems:
        raise _BadLines(problems)
    return rows


def _row(line: str, needed: str) -> dict[str, Any]:
    """Parse one line.

    Raises:
        ValueError: it is no object with a text `completion` and the field `needed` ("gold": a text or a number).
    """
    try:
        row = json.loads(line)
    except ValueError as error:
        raise ValueError(f"broken JSON ({error}); one object a line is needed") from None
    if not isinstance(row, dict):
        raise ValueError(f"{type(row).__name__} in place of an object")
    if missing := [name for name in ("completion", needed) if name not in row]:
        has = ", ".join(map(repr, row)) or "nothing"
        raise ValueError(f"no field {missing[0]!r}; the line has {has}")
    if not isinstance(row["completion"], str):
        raise ValueError(f"completion: {type(row['completion']).__name__}; a text is needed")
    if needed == "gold" and (not isinstance(row["gold"], str | int | float) or isinstance(row["gold"], bool)):
        raise ValueError(f"gold: {json.dumps(row['gold'])}; a text or a number is needed")
    return row


def print_judged(path: Path, rows: Sequence[tuple[int, dict[str, Any]]], judge: Judge) -> None:
    """Judge each row and print it as JSON with its `verdict` and `reason`. Undecided rows, and then their number, are
    reported on standard error. `rows`: with their line numbers in the file `path`, for these reports."""
    undecided = 0
    for number, row in rows:
        found = judge(row)
        if found.verdict == "undecided":
            undecided += 1
            print(f"{path}:{number}: undecided: {found.reason}", file=sys.stderr)
        print(json.dumps(row | {"verdict": found.verdict, "reason": found.reason}), flush=True)
    if undecided:
        print(f"{undecided:,} of {len(rows):,} lines undecided", file=sys.stderr)


@contextmanager
def _math() -> Iterator[Judge]:
    worker = Worker()
    try:
        yield lambda row: worker.judge(row["completion"], str(row["gold"]), str(row.get("prompt", "")), SECONDS)
    finally:
        worker.close()


@contextmanager
def _code() -> Iterator[Judge]:
    with ProgramJudge() as judge:
        print(judge.report, file=sys.stderr)
        yield lambda row: judge.judge(row["completion"], row["tests"])


if __name__ == "__main__":
    sys.exit(main())
