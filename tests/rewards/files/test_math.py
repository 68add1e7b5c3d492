"""`stretto score math`, from the file to the lines that come back.

Promises: lines come back in order, whole, with verdict, seconds and reason; a completion that cannot be judged is
undecided and told on stderr; every bad line is named with its number before anything is judged.
"""

import json
from pathlib import Path

import pytest

from stretto.core.errors import DataError
from stretto.rewards.config import RewardsConfig
from stretto_app.extensions.commands.score import MathLine, print_scored_answers, read_lines

CONFIG = RewardsConfig(function="math", workers=1)


def written(folder: Path, *lines: str) -> Path:
    path = folder / "completions.jsonl"
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def test_lines_come_back_in_order_with_verdict_and_seconds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [
        {"gold": "42", "completion": r"\boxed{42}", "id": "a"},
        {"gold": 7, "completion": "8"},
        {"gold": r"\frac{1}{", "completion": "1"},
        {"gold": "0.5", "answer": "½"},
    ]
    print_scored_answers(written(tmp_path, *[json.dumps(row) for row in rows], ""), CONFIG)
    printed = capsys.readouterr()
    told = [json.loads(line) for line in printed.out.splitlines()]
    assert [{name: row[name] for name in row if name not in ("verdict", "seconds", "reason")} for row in told] == rows
    assert [row["verdict"] for row in told] == ["right", "wrong", "undecided", "right"]
    assert all(0 <= row["seconds"] < 10 for row in told)
    undecided = printed.err.splitlines()[0].partition("undecided: ")[2]
    assert [row["reason"] for row in told] == ["", "the final answer is '8', the gold answer '7'", undecided, ""]
    assert printed.err.startswith(f"{tmp_path}/completions.jsonl:3: undecided: ")
    assert printed.err.endswith("1 of 4 lines undecided\n")


BAD = [
    ('{"gold": "1"}', "missing required field `completion`"),
    (
        '{"gold": "1", "completion": "1", "answer": "1"}',
        "`completion`, and also `answer`, which is its other name; the gold answer is `gold`",
    ),
    *[('{"completion": "1"}', "missing required field `gold`"), ('{"gold": null, "completion": "1"}', "at `$.gold`")],
    *[('{"gold": [1], "completion": "1"}', "at `$.gold`"), ('{"gold": true, "completion": "1"}', "at `$.gold`")],
    ('{"gold": "1", "completion": 1}', "at `$.completion`"),
    *[('{"gold": "1", "completion": null}', "at `$.completion`"), ('["1", "1"]', "Expected `object`")],
    *[('{"gold": "1", "completion": ', "broken JSON"), ('{"gold": NaN, "completion": "1"}', "broken JSON")],
    *[('{"gold": "1", "completion": "\\ud800"}', "broken JSON"), ('{"gold": ' + "[" * 5000, "broken JSON")],
]


@pytest.mark.parametrize(("line", "words"), BAD, ids=[words for _, words in BAD])
def test_a_bad_line_is_named(tmp_path: Path, line: str, words: str) -> None:
    path = written(tmp_path, '{"gold": "1", "completion": "1"}', "", line)
    with pytest.raises(DataError) as refused:
        read_lines(path, MathLine)
    assert refused.value.exit_code == 2
    [problem] = refused.value.problems
    assert problem.place == f"{path}:3"
    assert words in str(problem)


def test_all_bad_lines_are_named_at_once_and_none_is_judged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path, "{", *["{}"] * 25, '{"gold": "1", "completion": "1"}')
    with pytest.raises(DataError) as refused:
        print_scored_answers(path, CONFIG)
    assert [problem.place for problem in refused.value.problems] == [f"{path}:1", f"{path}:2"]
    assert str(refused.value).endswith("; and 24 more rows")
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("content", "words"), [(None, "no such file"), (b"", "no rows"), (b"\xff\xfe", "a UTF-8 text file is needed")]
)
def test_a_file_that_cannot_be_scored_is_named(tmp_path: Path, content: bytes | None, words: str) -> None:
    path = tmp_path / "completions.jsonl"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(DataError, match=words):
        read_lines(path, MathLine)


def test_other_ends_of_lines_and_a_mark_at_the_beginning_are_read(tmp_path: Path) -> None:
    path = tmp_path / "completions.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"gold": "1", "completion": "1"}\r\n{"gold": "2", "completion": "a\xe2\x80\xa8b"}')
    assert [line.fields.completion for line in read_lines(path, MathLine)] == ["1", "a\u2028b"]
