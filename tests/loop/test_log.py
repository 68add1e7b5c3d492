"""``log.txt``: everything that is shown is written down first, and a run does not end because nobody looks."""

from __future__ import annotations

from pathlib import Path

import msgspec

from stretto.loop.records.log import RunLog
from stretto.loop.records.reporter import SilentReporter
from stretto.store.series.metrics import EvaluationLine, StepMetrics
from stretto.trainer.messages import SupervisedProgress

STEP = StepMetrics(
    step=3,
    version=3,
    wall_seconds=9.0,
    rl_seconds=4.0,
    accuracy=0.5,
    reward=0.25,
    length_mean=12.0,
    length_max=30,
    staleness_mean=1.5,
    staleness_max=2,
    trained_tokens=640,
)
EVALUATION = EvaluationLine(step=3, version=3, wall_seconds=9.0, rl_seconds=4.0, accuracy=0.75, prompts=512)


class Broken(SilentReporter):
    """A terminal that is gone; what prints to it gives up like the terminal's library does."""

    def __init__(self, error: BaseException) -> None:
        self.error, self.asked = error, 0

    def say(self, text: str) -> None:
        self.asked += 1
        raise self.error


def test_everything_is_written_down_with_its_time(tmp_path: Path) -> None:
    logbook = RunLog(tmp_path / "log.txt", SilentReporter())
    logbook.say("engine-0 was killed by SIGKILL: a new one is started")
    logbook.learning(SupervisedProgress(step=5, steps=10, loss=0.25, seconds=1.0))
    logbook.step(STEP)
    logbook.evaluated(EVALUATION)
    logbook.evaluated(msgspec.structs.replace(EVALUATION, undecided=32))
    lines = (tmp_path / "log.txt").read_text().splitlines()
    assert [line.split("  ", 1)[1] for line in lines] == [
        "engine-0 was killed by SIGKILL: a new one is started",
        "warm start 5/10: loss 0.2500",
        "step 3: accuracy 0.500, reward 0.250, 640 tokens, staleness 1.50",
        "held-out accuracy of version 3: 0.7500",
        "held-out accuracy of version 3: 0.7500 (32 of 512 undecided)",
    ]


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
