"""Promises: `stretto watch RUN --terminal` shows a run from its folder alone: a finished one with its state, a running
one as it grows, one that dies with the reason, one that goes on from an earlier step from there; `q` and a signal
leave; the terminal is given back as it was; nothing in the folder is touched; without a terminal it prints lines.
"""

import os
import pty
import signal
import sys
import termios
import threading
from contextlib import suppress
from pathlib import Path

import pytest

from stretto.core.errors import RunFolderError
from stretto.store import lock
from stretto.store.series.metrics import MetricsLog
from stretto_app.cli.main import main
from stretto_report.watch.terminal import watch_in_terminal
from tests.launch.running import default_dispositions
from tests.store.make import ledger_at
from tests.watch.runs import ENDED, LOG, evaluation, step_line, write_run


def stay(seconds: float) -> bool:
    raise AssertionError("a run that has ended is not waited for")


def contents(folder: Path) -> dict[str, tuple[int, bytes]]:
    """Of all files but the index of the ledger's log, in which every reader of a running run says where it reads."""
    files = [path for path in folder.iterdir() if path.is_file() and not path.name.endswith("-shm")]
    return {path.name: (path.stat().st_mtime_ns, path.read_bytes()) for path in files}


def test_a_finished_run_is_shown_with_state_not_touched(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(tmp_path / "first")
    before = contents(run)
    watch_in_terminal([run], stay)
    *_, last, state = capsys.readouterr().out.splitlines()
    assert last.startswith("step 2/3 0:04 left 0:02 | held-out 50.0 % | reward .2 | len 3 | stale .5 | gen ")
    assert state == "first: finished"
    assert contents(run) == before


def test_a_run_that_grows_and_dies_is_followed_to_its_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(tmp_path / "first", log=LOG)
    held, metrics, waits = lock.acquire(run), MetricsLog(run / "metrics.jsonl"), list[float]()

    def grow(seconds: float) -> bool:
        waits.append(seconds)
        if len(waits) == 1:
            for step in range(3, 31):
                metrics.append(step_line(step, entropy=1.0 if step <= 10 else 0.01))
        elif len(waits) == 2:
            metrics.append(evaluation(30, 0.75))
            with (run / "log.txt").open("a") as log:
                log.write("2026-11-22 03:08:45  failed: engine-0 is gone\x1b[2J\n")
            os.close(held)
        return False

    watch_in_terminal([run], grow)
    *_, last, alarm, state = capsys.readouterr().out.splitlines()
    assert last.startswith("step 30/3 1:00 | held-out 75.0 %")
    assert alarm.startswith("alarm  entropy collapse since step")
    assert state == r"first: dead: engine-0 is gone\x1b[2J"
    assert waits == [0.5, 0.5]


def test_a_run_that_goes_back_is_shown_from_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(tmp_path / "first")
    held, waits = lock.acquire(run), list[float]()

    def rewind(seconds: float) -> bool:
        waits.append(seconds)
        if len(waits) == 1:
            (run / "metrics.jsonl").unlink()
            MetricsLog(run / "metrics.jsonl").append(step_line(1, rl_seconds=9.0))
        return len(waits) == 2

    watch_in_terminal([run], rewind)
    os.close(held)
    *_, last, state = capsys.readouterr().out.splitlines()
    assert last.startswith("step 1/3 0:09 | reward")  # without the held-out accuracy of before
    assert state == "first: running"


def forked(run: Path, terminal: int, environment: dict[str, str]) -> int:
    """The command, in a copy of this process whose streams are the terminal."""
    if pid := os.fork():
        return pid
    code = 9
    try:
        for number in range(3):
            os.dup2(terminal, number)
        os.environ.clear()
        os.environ.update(environment)
        streams = [open(number, "rww"[number], encoding="utf-8") for number in range(3)]  # noqa: SIM115 - until it ends
        sys.stdin, sys.stdout, sys.stderr = streams
        sys.argv = ["stretto", "watch", str(run), "--terminal"]
        main()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else code
    finally:
        sys.stdout.flush()
        os._exit(code)


def on_a_terminal(run: Path, columns: int, language: dict[str, str], leave: str) -> tuple[int, str, bool]:
    """The exit code of the command, what it wrote, and whether the terminal is as it was."""
    controller, terminal = pty.openpty()
    termios.tcsetwinsize(terminal, (40, columns))
    before, shown, seen = termios.tcgetattr(terminal), bytearray(), threading.Event()

    def read() -> None:
        while True:
            try:
                shown.extend(os.read(controller, 1 << 16))
            except OSError:  # the last who had the terminal open has closed it
                return
            if b"2/3" in shown and (columns < 100 or b"engine-1 NOT proven" in shown):  # the proofs come below the view
                seen.set()

    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("LC_", "LANG"))}
    with default_dispositions():
        pid = forked(run, terminal, inherited | {"TERM": "xterm"} | language)
    reader = threading.Thread(target=read)
    reader.start()
    try:
        assert seen.wait(100), bytes(shown)
        if leave == "q":
            os.write(controller, b"q")
        else:
            os.kill(pid, signal.SIGINT)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        same = termios.tcgetattr(terminal) == before
    finally:  # else the reader waits for ever
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        os.close(terminal)
        reader.join(10)
        os.close(controller)
    return code, shown.decode(), same


@pytest.mark.parametrize(
    ("columns", "language", "leave"), [(100, {"LANG": "C.UTF-8"}, "q"), (40, {"LANG": "C"}, "Ctrl-C")]
)
def test_a_terminal_has_the_view_until_left(tmp_path: Path, columns: int, language: dict[str, str], leave: str) -> None:
    run = write_run(tmp_path / "first", log=LOG)
    held = lock.acquire(run)
    with ledger_at(run / "ledger.sqlite"):  # as the run has it open
        before = contents(run)
        code, shown, same = on_a_terminal(run, columns, language, leave)
        assert contents(run) == before
    os.close(held)
    assert (code, same) == (0, True)
    assert shown.isascii() is (language == {"LANG": "C"})
    assert ("█" if columns == 100 else "#") in shown
    assert "Traceback" not in shown
    if columns == 100:
        assert "engine-0 proven: version 2" in shown
        assert "engine-1 NOT proven: version 0" in shown


def test_one_run_is_shown_and_others_are_named(tmp_path: Path) -> None:
    write_run(tmp_path / "runs" / "first", log=LOG + ENDED)
    with pytest.raises(RunFolderError, match="--terminal: 2 folders; shows one run"):
        watch_in_terminal([tmp_path, tmp_path], stay)
    with pytest.raises(RunFolderError, match=r"is no run folder; give one of those in it: .*runs/first$"):
        watch_in_terminal([tmp_path / "runs"], stay)
    with pytest.raises(RunFolderError, match="nowhere: does not exist"):
        watch_in_terminal([tmp_path / "nowhere"], stay)
    (tmp_path / "empty").mkdir()
    with pytest.raises(RunFolderError, match="is no run folder; give a folder that `stretto train` created"):
        watch_in_terminal([tmp_path / "empty"], stay)


@pytest.mark.parametrize(
    ("closed", "words"),
    [("stdin", ("watch", "--terminal")), ("stdout", ("inspect", "--json")), ("stdout", ("export",))],
)
def test_a_command_whose_caller_has_closed_a_stream_does_its_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, closed: str, words: tuple[str, ...]
) -> None:
    monkeypatch.setattr(sys, "argv", ["stretto", *words, str(write_run(tmp_path / "first"))])
    monkeypatch.setattr(sys, closed, None)
    with pytest.raises(SystemExit) as ended:
        main()
    getattr(sys, closed).close()
    assert not ended.value.code
