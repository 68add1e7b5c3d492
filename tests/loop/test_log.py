"""``log.txt``: everything that is shown is written down first, steps now and then and the last one; a run does not end
because nobody looks."""

from pathlib import Path

import msgspec

from stretto.core.events import SupervisedProgress
from stretto.loop.records.reporter import RunLog, SilentReporter
from tests.store.lines import evaluation_line, step_line

STEP = step_line(3, rl_seconds=4.0, reward=0.25, length_mean=12.0)
EVALUATION = evaluation_line(3, 0.75)


class Broken(SilentReporter):
    """A terminal that is gone; what prints to it gives up like the terminal's library does."""

    def __init__(self, error: BaseException) -> None:
        self.error, self.asked = error, 0

    def say(self, text: str) -> None:
        self.asked += 1
        raise self.error


def test_everything_is_written_down_with_its_time(tmp_path: Path) -> None:
    logbook = RunLog(tmp_path / "log.txt", SilentReporter(), steps=4, seconds=0.0)
    logbook.say("engine-0 was killed by SIGKILL: a new one is started")
    logbook.learning(SupervisedProgress(step=5, steps=10, loss=0.25, seconds=1.0))
    logbook.step(STEP)
    logbook.evaluated(EVALUATION)
    logbook.evaluated(msgspec.structs.replace(EVALUATION, undecided=32))
    logbook.evaluated(msgspec.structs.replace(EVALUATION, accuracy=0.0, undecided=512))
    logbook.evaluated(msgspec.structs.replace(EVALUATION, undecided=600, samples=1024))
    lines = (tmp_path / "log.txt").read_text().splitlines()
    assert [line.split("  ", 1)[1] for line in lines] == [
        "engine-0 was killed by SIGKILL: a new one is started",
        "warm start 5/10 0:01 left 0:01 | loss 0.2500",
        "step 3/4 0:04 left 0:01 | reward .25 | len 12 | stale 1.5",
        "held-out accuracy of version 3: 0.7500",
        "held-out accuracy of version 3: 0.7500 (32 of 512 undecided)",
        "held-out accuracy of version 3: – (512 of 512 undecided)",
        "held-out accuracy of version 3: 0.7500 (600 of 1024 undecided)",
    ]


def test_steps_have_a_line_now_and_then_and_the_last_has_its_line(tmp_path: Path) -> None:
    for steps in (40, 60):  # the second is stopped before its last step
        log = tmp_path / f"{steps}.txt"
        logbook = RunLog(log, SilentReporter(), steps=steps, seconds=100.0)
        for number in range(1, 41):
            logbook.step(msgspec.structs.replace(STEP, step=number))
        logbook.ends()
        logbook.ends()
        lines = [line.split("  ", 1)[1] for line in log.read_text().splitlines()]
        assert [line.split()[1] for line in lines] == [f"1/{steps}", f"40/{steps}"]


def test_a_run_goes_on_when_nobody_looks_any_more(tmp_path: Path) -> None:
    for error in (BrokenPipeError(), SystemExit(1)):
        stage = Broken(error)
        logbook = RunLog(tmp_path / "log.txt", stage)
        logbook.say("one")
        logbook.say("two")
        assert stage.asked == 1
    assert len((tmp_path / "log.txt").read_text().splitlines()) == 4


def test_a_log_that_cannot_be_written_is_left_out(tmp_path: Path) -> None:
    RunLog(tmp_path / "nowhere" / "log.txt", SilentReporter()).say("one")
    assert not (tmp_path / "nowhere").exists()
