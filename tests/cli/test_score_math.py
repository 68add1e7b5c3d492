"""`stretto score math` at the door: what it prints, and what it refuses."""

import json
from collections.abc import Callable
from pathlib import Path

from tests.launch.running import Ended

Door = Callable[..., Ended]


def test_a_file_of_answers_comes_back_judged(door: Door, tmp_path: Path) -> None:
    file = tmp_path / "completions.jsonl"
    file.write_text('{"gold": "42", "completion": "It is $42$."}\n{"gold": "42", "completion": "It is not $42$."}\n')
    ended = door("score", "math", file, "--workers", "1")
    assert ended.code == 0, ended.err
    told = [json.loads(line) for line in ended.out.splitlines()]
    assert [list(row) for row in told] == [["gold", "completion", "verdict", "seconds", "reason"]] * 2
    assert [row["verdict"] for row in told] == ["right", "wrong"]


def test_bad_lines_and_bad_words_are_refused(door: Door, tmp_path: Path) -> None:
    file = tmp_path / "completions.jsonl"
    file.write_text('{"gold": "42", "completion": "42"}\n{"gold": "42"}\nnothing\n')
    ended = door("score", "math", file)
    ended.refused(f"{file}:2: Object missing required field `completion`", f"{file}:3: broken JSON")
    assert ended.out == ""
    door("score", "math", tmp_path / "nowhere.jsonl").refused("no such file")
    door("score", "math", file, "--workers", "0").refused("--workers")
