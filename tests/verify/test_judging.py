"""The face of `stretto_verify`: a verdict is right, wrong or undecided, with its reason, in any thread and in bounded
time; its command gives back each line of a file, or names every bad line. (`test_wheel.py`: it needs neither torch nor
stretto.)
"""

import json
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from stretto_verify import Judged, ProgramJudge, judge_math, judge_program, judging
from stretto_verify.cli import main
from stretto_verify.sandbox.attacks import ATTACKS
from stretto_verify.sandbox.config import SandboxConfig
from stretto_verify.sandbox.probe import probe
from stretto_verify.worker import Worker

#: From Math-Verify#65, and a tower of powers.
BOMBS = [r"\boxed{9^{9^{9^{9^9}}}}", r"\boxed{\frac{10^{12}!}{10^{12}!}}", r"$\sum_{k=1}^{10^{10}} \binom{10^{9}}{k}$"]
ADD_ONE = [{"stdin": "41", "stdout": "42"}, {"stdin": "-1", "stdout": "0"}]


@pytest.mark.parametrize(
    ("completion", "gold", "verdict", "reason"),
    [
        (r"so $x = \frac12$.", "0.5", "right", ""),
        (r"\boxed{43}", "42", "wrong", "the final answer is '43', the gold answer '42'"),
        (r"\boxed{43}", "6 * 7 = 42 #### 42", "wrong", "the final answer is '43', the gold answer '42'"),
        ("<think>42", "42", "wrong", "no final answer; the gold answer is '42'"),
        ("1", r"\frac{1}{", "undecided", "a gold answer that cannot be read"),
        ("no idea", r"\frac{1}{", "undecided", "a gold answer that cannot be read"),
        ("1", "", "undecided", "the gold answer '' holds no answer"),
    ],
)
def test_a_verdict_has_its_reason(completion: str, gold: str, verdict: str, reason: str) -> None:
    judged = judge_math(completion, gold)
    assert judged.verdict == verdict
    assert judged.reason.startswith(reason)
    assert bool(judged.reason) == (verdict != "right")
    assert judged.right == (verdict == "right")


def test_what_is_no_text_is_refused_by_its_name() -> None:
    with pytest.raises(TypeError, match="gold: 3 is of the type int; give a text"):
        judge_math("3", 3)  # type: ignore[arg-type]


def test_threads_judge_as_the_main_thread_does_what_never_ends_too() -> None:
    cases = [*((bomb, "42") for bomb in BOMBS)]
    cases += [(rf"\boxed{{{value}}}", "1/2") for value in ("0.5", r"\frac{2}{4}", "0.51", "x")]
    here, there = [judge_math(*case) for case in cases], list[Judged]()
    thread = threading.Thread(target=lambda: there.extend(judge_math(*case) for case in cases))
    thread.start()
    thread.join(120)
    assert there == here
    assert [judged.verdict == "right" for judged in here] == [False] * 3 + [True, True, False, False]


def test_a_process_that_judges_too_long_or_dies_is_replaced() -> None:
    worker = Worker()
    try:
        assert worker.judge("1", "1", "", 0.5) == Judged("right")
        assert worker.judge("1", "1", "", -1.0) == Judged("undecided", "no verdict within -10 s")
        assert worker.judge("1", "1", "", 0.5) == Judged("right")
        process = worker._process
        assert process is not None
        process.kill()
        process.wait(10)
        assert worker.judge("1", "1", "", 0.5) == Judged("undecided", "its process ended")
        assert worker.judge("\ud800", "1", "", 0.5).verdict == "undecided"
        assert worker.judge("1", "1", "", 0.5) == Judged("right")
    finally:
        worker.close()


def test_a_stopped_process_is_replaced_however_long_the_completion_is() -> None:
    worker = Worker()
    try:
        assert worker.judge("1", "1", "", 0.5) == Judged("right")
        process = worker._process
        assert process is not None
        os.kill(process.pid, signal.SIGSTOP)
        longer_than_a_pipe = "so it is\n" * 10_000
        assert worker.judge(longer_than_a_pipe, "1", "", 0.1).reason.startswith("no verdict within")
        assert worker.judge("1", "1", "", 0.5) == Judged("right")
        assert worker.judge(longer_than_a_pipe + r"\boxed{1}", "1", "", 10.0) == Judged("right")
    finally:
        worker.close()


def test_a_verdict_that_nobody_waited_for_is_not_that_on_the_next_completion(monkeypatch: pytest.MonkeyPatch) -> None:
    wait = select.select

    def interrupt(readers: list[Any], *further: Any) -> object:
        if readers:  # the request was sent
            raise KeyboardInterrupt
        return wait(readers, *further)

    worker = Worker()
    try:
        assert worker.judge("1", "1", "", 0.5) == Judged("right")
        with monkeypatch.context() as patch:
            patch.setattr("stretto_verify.worker.select.select", interrupt)
            with pytest.raises(KeyboardInterrupt):
                worker.judge("2", "1", "", 0.5)
        assert worker.judge("1", "1", "", 0.5) == Judged("right")
    finally:
        worker.close()


@pytest.fixture
def quickly_probed(monkeypatch: pytest.MonkeyPatch) -> Iterator[SandboxConfig]:
    """Limits of a program whose sandbox is attacked once, in place of all the attacks of `sandbox/test_attacks.py`."""
    monkeypatch.setattr(judging, "probe", partial(probe, attacks=ATTACKS[:1]))
    judging._probed.cache_clear()
    yield SandboxConfig(seconds=0.2, completion_seconds=0.4)
    judging._probed.cache_clear()


def test_a_program_is_judged_by_its_tests(quickly_probed: SandboxConfig) -> None:
    with ProgramJudge(quickly_probed) as judge:
        assert judge.judge("```python\nprint(int(input()) + 1)\n```", ADD_ONE) == Judged("right")
        assert judge.judge("print(42)", ADD_ONE) == Judged("wrong", "test 2: wrong output")
        assert judge.judge("no program", ADD_ONE).verdict == "wrong"
        assert judge.judge("print(1)", []) == Judged("undecided", "there are no tests")
        assert judge.judge("while True: pass", ADD_ONE) == Judged("wrong", "test 1: time limit")
        pair = [{"call": "f", "args": [(1, 2)], "expected": (2, 1)}]
        assert judge.judge("def f(pair): return pair[::-1]", pair) == Judged("right")
        assert judge.judge("def f(pair): return list(pair[::-1])", pair) == Judged("wrong", "call 1: wrong result")
        assert judge.judge("print(1)", [{"stdin": "\ud800", "stdout": "1"}]).verdict == "undecided"
    assert judge_program("print(int(input()) + 1)", ADD_ONE, quickly_probed).verdict == "right"


def written(folder: Path, *rows: object) -> str:
    path = folder / "completions.jsonl"
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows), encoding="utf-8")
    return str(path)


def test_lines_come_back_with_verdict_and_reason(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    rows: list[dict[str, Any]] = [
        {"completion": r"\boxed{42}", "gold": 42, "id": 7},
        {"completion": "1", "gold": r"\frac{1}{"},
    ]
    assert main(["math", written(tmp_path, *rows, "")]) == 0
    printed = capfd.readouterr()
    told = [json.loads(line) for line in printed.out.splitlines()]
    assert told[0] == rows[0] | {"verdict": "right", "reason": ""}
    assert (told[1]["verdict"], told[1]["gold"]) == ("undecided", rows[1]["gold"])
    assert f"{tmp_path}/completions.jsonl:2: undecided: " in printed.err
    assert "1 of 2 lines undecided" in printed.err


def test_output_that_nobody_reads_any_more_ends_the_command_without_a_traceback(tmp_path: Path) -> None:
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "stretto_verify.cli", "math", written(tmp_path, {"completion": "1", "gold": "1"})]
    ended = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, timeout=120, check=False)
    os.close(write)
    assert (ended.returncode, ended.stderr) == (1, b"")


@pytest.mark.usefixtures("quickly_probed")
def test_programs_come_back_too(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["code", written(tmp_path, {"completion": "print(1)", "tests": ADD_ONE})]) == 0
    printed = capfd.readouterr()
    assert json.loads(printed.out)["reason"] == "test 1: wrong output"
    assert "sandbox level" in printed.err


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ("{", "broken JSON"),
        ([1], "list in place of an object"),
        ({"completion": "1"}, "no field 'gold'; the line has 'completion'"),
        ({"gold": "1"}, "no field 'completion'"),
        ({"completion": 1, "gold": "1"}, "completion: int; a text is needed"),
        ({"completion": "1", "gold": True}, "gold: true; a text or a number is needed"),
        ("[" * 100_000, ":2: "),
    ],
)
def test_every_bad_line_is_named_and_nothing_is_judged(
    row: object, told: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = written(tmp_path, {"completion": "1", "gold": "1"}, row, row)
    assert main(["math", path]) == 2
    printed = capfd.readouterr()
    assert printed.out == ""
    assert f"{path}:2: " in printed.err
    assert f"{path}:3: " in printed.err
    assert told in printed.err


@pytest.mark.parametrize(
    ("text", "told"), [(b"", "no rows"), (None, "cannot be read"), (b"\n\xff", ":2: the byte 0xff")]
)
def test_no_rows_are_a_mistake(
    text: bytes | None, told: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    if text is not None:
        (tmp_path / "rows.jsonl").write_bytes(text)
    assert main(["code", str(tmp_path / "rows.jsonl")]) == 2
    assert told in capfd.readouterr().err


def test_the_readme_s_reward_function_of_trl_leaves_out_what_is_undecided() -> None:
    text = (Path(__file__).parents[2] / "packages" / "verify" / "README.md").read_text(encoding="utf-8")
    block = next(block for block in text.split("```python\n") if "def correct(completions" in block).partition("```")[0]
    names: dict[str, Any] = {}
    exec(block, names)
    assert names["correct"](["1", "2", "1"], solution=["1", "1", r"\frac{1}{"]) == [1.0, 0.0, None]
