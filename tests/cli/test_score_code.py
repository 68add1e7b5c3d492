"""`stretto score code`: programs of a file, judged in the sandbox.

Promises: lines come back in order with all they had and verdict, passed, seconds and level added; options are those of
the sandbox; what cannot be read is named with its line before anything is run.

`stretto score math` at the door: what it prints, and what it refuses."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from stretto.core.errors import DataError
from stretto_app.cli.main import app
from stretto_app.extensions.commands import score as scoring
from stretto_verify.sandbox.config import SandboxConfig
from stretto_verify.sandbox.probe import Report, probe
from stretto_verify.sandbox.walls import Walls
from tests.launch.running import Ended

SQUARE = [{"stdin": "7\n", "stdout": "49\n"}, {"stdin": "8\n", "stdout": "64\n"}]
NEAR = {"test_list": ["assert abs(root(2) - 1.41) < 0.01"]}  # an assert with a tolerance
CALLS = [{"call": "f", "args": [[1, 2]], "expected": 3}, {"call": "f", "args": [[]], "expected": 0}]


def score(tmp_path: Path, *rows: object, options: tuple[str, ...] = ()) -> list[dict[str, object]]:
    file = tmp_path / "completions.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = CliRunner().invoke(app, ["score", "code", str(file), *options])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_the_options_are_those_of_the_sandbox(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Path, SandboxConfig, int]] = []
    monkeypatch.setattr(scoring, "print_scored_programs", lambda *given: asked.append(given))
    score(tmp_path)
    options = "--cold --workers 1 --seconds 3 --completion-seconds 9 --memory 64 --lowest-level B --unsafe"
    score(tmp_path, options=tuple(options.split()))
    given = {
        "seconds": 3, "completion_seconds": 9, "memory_mib": 64, "warm": False, "lowest_level": "B", "unsafe": True,
    }  # fmt: skip
    file = tmp_path / "completions.jsonl"
    assert asked == [(file, SandboxConfig(), 2), (file, SandboxConfig.model_validate(given), 1)]


def test_lines_come_back_in_order_with_verdicts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a sandbox that is not attacked before."""
    asked: list[SandboxConfig] = []

    def walls(config: SandboxConfig) -> tuple[Walls, Report]:
        asked.append(config)
        return probe(config, [])

    monkeypatch.setattr(scoring, "probe", walls)
    rows = [
        {"id": 1, "completion": "```python\nprint(int(input()) ** 2)\n```", "tests": SQUARE},
        {"id": 2, "completion": "print(49)", "tests": SQUARE},
        {"id": 3, "completion": "def f(x): return sum(x)", "tests": CALLS},
        {"id": 4, "completion": "def f(x): return x[0] + x[1]", "tests": json.dumps(CALLS)},
        {"id": 5, "completion": "I do not know. ```c```", "tests": {"inputs": ["1"], "outputs": ["1"]}},
        {"id": 6, "completion": "def root(n): return n ** 0.5", "tests": NEAR},
        {"id": 7, "completion": "def root(n): return 1.43", "tests": NEAR},
    ]
    found = score(tmp_path, *rows)
    assert asked == [SandboxConfig()]
    assert [{**row, "verdict": v, "passed": p} for row, v, p in zip(rows, VERDICTS, PASSED, strict=True)] == [
        {key: value for key, value in row.items() if key not in ("seconds", "level")} for row in found
    ]
    assert len({row["level"] for row in found}) == 1
    assert all(str(row["level"]) in "ABCD" for row in found)
    assert all(isinstance(row["seconds"], float) for row in found)


VERDICTS = ["right", "wrong", "right", "wrong", "wrong", "right", "wrong"]
PASSED = [2, 1, 2, 1, 0, 1, 0]


def test_tests_that_cannot_be_read_are_named_with_their_lines(tmp_path: Path) -> None:
    rows = [{"completion": "x", "tests": SQUARE}, {"completion": "x", "tests": [3]}, {"completion": "x", "tests": []}]
    with pytest.raises(DataError) as refused:
        score(tmp_path, *rows)
    words = str(refused.value)
    assert "completions.jsonl:2: test 1 has int" in words
    assert "completions.jsonl:3: there are no tests" in words
    assert "the tests of 2 of 3 rows cannot be read" in words


def test_lines_without_an_answer_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"completions\.jsonl:1: .*completion.*needed: completion, tests"):
        score(tmp_path, {"tests": SQUARE})


@pytest.mark.parametrize(
    "words",
    [
        ("code", "--completion-seconds", "4000"),
        ("code", "--seconds", "601"),
        ("code", "--memory", "1048577"),
        ("math", "--timeout", "5000"),
    ],
)
def test_a_bound_beyond_what_is_allowed_is_a_mistake_of_the_user(tmp_path: Path, words: tuple[str, ...]) -> None:
    kind, option, value = words
    done = CliRunner().invoke(app, ["score", kind, str(tmp_path / "completions.jsonl"), option, value])
    assert done.exit_code == 2
    assert f"Invalid value for '{option}'" in done.output


Door = Callable[..., Ended]


def test_a_file_of_answers_comes_back_judged(door: Door, tmp_path: Path) -> None:
    file = tmp_path / "completions.jsonl"
    file.write_text('{"gold": "42", "completion": "It is $42$."}\n{"gold": "42", "completion": "It is not $42$."}\n')
    told = [json.loads(line) for line in door("score", "math", file, "--workers", "1").well().splitlines()]
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
