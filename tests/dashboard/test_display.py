"""What a person sees of a run: live, at the end, and later.

Promises: a terminal gets a panel and a file gets lines; nothing that is said is lost; the pace is bounded, and the last
state is always shown; the terminal is given back whatever fails; the summary adds up; the JSON is
one object and nothing else.
"""

import io
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from stretto.core.canary import CANARY, CanaryRecord, Proof
from stretto.core.events import SupervisedProgress
from stretto.store.inspection import CanaryProof
from stretto.store.selection import SELECTION, Bias, SelectionBias
from stretto.store.series.metrics import EvaluationLine, StepMetrics
from stretto.store.totals import ENGINES, TOTALS, Membership, Totals
from stretto_report.dashboard.terminal.progress import (
    Display,
    LineDisplay,
    open_display,
    panel,
    sparkline,
)
from stretto_report.dashboard.terminal.snapshot import Snapshot
from stretto_report.dashboard.terminal.summary import bar, print_inspection, summary_table
from stretto_report.reading.inspection import inspect_run
from tests.store.lines import evaluation_line, step_line
from tests.store.make import run_at


def metrics(step: int, **changed: Any) -> StepMetrics:
    numbers: dict[str, Any] = {"rl_seconds": 0.1 * step, "accuracy": 0.712, "reward": 0.712, "length_mean": 31.25}
    numbers |= {"length_max": 120, "staleness_max": 3, "generated_tokens": 150 * step}
    trainer = {"loss": -0.01234, "kl_behavior": 0.002, "grad_norm": 0.5, "learning_rate": 8e-5, "entropy": 1.0}
    numbers |= {"queues": {"in_flight": 24.0, "buffered": 7.0}, "trainer": trainer}
    return step_line(step, **(numbers | {"busy": {"trainer": 0.9, "engine-0": 1.0, "conductor": None}} | changed))


EVALUATION = evaluation_line(0, 0.415)


def play(display: Display) -> None:
    with display:
        display.say("policy/v000000 [8 MB]")
        display.learning(SupervisedProgress(10, 300, 0.31, 12.0))
        display.learning(SupervisedProgress(300, 300, 0.25, 12.0))
        display.evaluated(EVALUATION)
        for step in range(1, 41):
            display.step(metrics(step))


def test_the_last_line_of_supervised_training_comes_before_what_is_said_next() -> None:
    output = io.StringIO()
    with open_display(600, Console(file=output)) as display:
        display.learning(SupervisedProgress(10, 300, 0.31, 12.0))
        display.learning(SupervisedProgress(300, 300, 0.25, 12.0))
        display.say("phase 3 of 3: reinforcement learning, steps 1 to 600")
    assert [line.partition(" ")[0] for line in output.getvalue().splitlines()] == ["warm", "warm", "phase"]


def test_a_file_gets_a_line_now_and_then_and_the_last_of_each_phase() -> None:
    output = io.StringIO()
    display = open_display(600, Console(file=output))
    assert isinstance(display, LineDisplay)
    play(display)
    lines = output.getvalue().splitlines()
    assert lines[:3] == [
        "policy/v000000 [8 MB]",
        "warm start 10/300 0:12 left 5:48 | loss 0.3100",
        "warm start 300/300 0:12 left 0:00 | loss 0.2500",
    ]
    assert lines[3] == "step 1/600 0:00 | held-out 41.5 % | reward .71 | len 31 | stale 1.5 | gen 100 % | train 90 %"
    # 100 tokens trained and 150 generated in each tenth of a second
    assert lines[4:] == [
        "step 40/600 0:04 left 0:56 | held-out 41.5 % | reward .71 | len 31 | stale 1.5 | gen 1.5k t/s 100 % | "
        "train 1k 90 %"
    ]


def test_a_verbose_display_has_all_measurements_below_in_lines_of_the_same_length() -> None:
    output = io.StringIO()
    with open_display(600, Console(file=output), verbose=True) as display:
        display.evaluated(EVALUATION)
        for step in range(1, 41):
            display.step(metrics(step))
    assert output.getvalue().splitlines()[-3:] == [
        "  held-out 41.5% (v0) | accuracy 71.2% | reward 0.712 | length 31.2, longest 120 | staleness 1.50, largest 3",
        "  loss -0.0123 | KL to behavior 0.002 | grad norm 0.5 | learning rate 8e-05 | in flight 24 | buffered 7",
        "  1,500 tokens/s generated | 1,000 tokens/s trained | engine-0 100% | trainer 90%",
    ]


def test_a_terminal_gets_a_panel_that_ends_with_the_last_step() -> None:
    output = io.StringIO()
    display = open_display(600, Console(file=output, force_terminal=True, width=100, color_system=None))
    play(display)
    shown = output.getvalue()
    assert "policy/v000000 [8 MB]" in shown
    last = " ".join(shown[shown.rindex("╭") :].split())
    told = ("training 40/600", "0:04 elapsed, about 0:56 left", "held-out 41.5% (v0)", "learning rate 8e-05")
    for words in (*told, "1,500 tokens/s", "engine-0"):
        assert words in last


def test_an_accuracy_says_how_many_answers_nobody_could_judge() -> None:
    output = io.StringIO()
    with open_display(600, Console(file=output), verbose=True) as display:
        display.evaluated(msgspec.structs.replace(EVALUATION, undecided=12))
        display.step(metrics(1))
    assert "held-out 41.5% (v0, 12 undecided)" in output.getvalue()


def test_a_display_that_is_shown_nothing_says_nothing() -> None:
    output = io.StringIO()
    with open_display(600, Console(file=output)):
        pass
    assert output.getvalue() == ""


class BreakingAlarms:
    """They cannot be decided a second time."""

    def __init__(self) -> None:
        self._asked = False

    def step(self, metrics: StepMetrics) -> None: ...

    def evaluated(self, evaluation: EvaluationLine) -> None: ...

    def sentences(self) -> dict[str, str]:
        if self._asked:
            raise ZeroDivisionError
        self._asked = True
        return {}


def test_the_cursor_comes_back_when_the_last_picture_fails() -> None:
    output = io.StringIO()
    console = Console(file=output, force_terminal=True, force_interactive=True, width=100)
    with pytest.raises(ZeroDivisionError):
        play(open_display(600, console, BreakingAlarms()))  # the last steps are drawn at the end
    assert output.getvalue().rindex("\x1b[?25h") > output.getvalue().rindex("\x1b[?25l")


def test_the_proofs_of_engines_stand_below_with_version_distance_and_tolerance() -> None:
    output = io.StringIO()
    proofs = (PROOF, msgspec.structs.replace(PROOF, version=4, distance=0.5, proven=False, which="worst"))
    console = Console(file=output, force_terminal=True, width=100, color_system=None)
    with open_display(600, console, proofs=lambda: proofs) as display:
        display.step(metrics(1, canary={"one": 0.04, "engine-3": 0.125}))
    shown = " ".join(output.getvalue().split())
    assert "canary 12% of its tolerance (engine-3)" in shown
    assert "canary, newest engine-3 proven: version 7, 2.5e-08 nats from the trainer, 2.0e-07 allowed" in shown
    assert "canary, worst engine-3 NOT proven: version 4, 5.0e-01 nats from the trainer, 2.0e-07 allowed" in shown


def test_of_very_many_proofs_the_first_are_shown_and_the_others_counted() -> None:
    output = io.StringIO()
    Console(file=output, width=100).print(panel(Snapshot("training", step=1, steps=2, seconds=1), (), [PROOF] * 70))
    assert output.getvalue().count("engine-3 proven") == 8
    assert "62 more proofs: stretto inspect" in output.getvalue()


PROOF = CanaryProof("engine-3", version=7, distance=2.5e-8, tolerance=2e-7, proven=True, which="newest")


def test_a_fraction_above_one_fills_its_place_in_ascii() -> None:
    output = io.StringIO()
    shown = panel(Snapshot(phase="training", step=1, steps=2, seconds=1, busy={"trainer": 1.4}), ascii_only=True)
    Console(file=output, width=80).print(shown)
    assert f" {'#' * 16} 140%" in output.getvalue()


def test_without_a_last_step_no_time_is_left() -> None:
    assert Snapshot(phase="training", step=5, steps=0, seconds=10).remaining is None
    assert Snapshot(phase="training", step=5, steps=8, seconds=10).remaining == 6  # three steps of two seconds
    assert Snapshot(phase="training", step=8, steps=8, seconds=10).remaining == 0


@pytest.fixture
def finished_run(tmp_path: Path) -> Path:
    totals = Totals(
        max_staleness=4,
        generated=81920,
        recomputed=9120,
        busy={"trainer": 8.0},
        wall_seconds=16.0,
        rl_seconds=10.0,
        initial_accuracy=0.41,
        final_accuracy=0.96,
    )
    bias = {"length": Bias(0.62, 3e-8), "difficulty": Bias(), "latency": Bias(0.71, 2e-9)}
    with run_at(tmp_path / "run") as (_, ledger):
        ledger.put(TOTALS, totals)
        ledger.put(SELECTION, SelectionBias(windows=1, newest=bias))
    return tmp_path / "run"


def test_the_summary_says_what_was_learnt_and_what_it_took(finished_run: Path) -> None:
    output = io.StringIO()
    Console(file=output, width=100).print(summary_table(inspect_run(finished_run), "a run"))
    text = output.getvalue()
    for words in ("41.0% → 96.0%", "10.0 s of RL, 16.0 s in all", "81,920 generated", "9,120 recomputed", "80%"):
        assert words in text
    # 81,920 of 91,040 tokens; 8 of the 10 seconds of RL, and 6 are behind them
    assert "generated and waiting  81,920 tokens (90.0%), 8.0 s" in text
    assert "bounded by engine.load_interval, engine.on_update" in text  # 9,120 are 10.02 %
    assert "rollout.max_staleness" not in text  # nothing is masked
    assert "trainer  80% of the training at work; batch 20%, ending 6.0 s" in text
    assert "selection bias  length +0.62, p = 3e-08" in text
    assert "selection bias  latency +0.71, p = 2e-09" in text
    assert "difficulty" not in text  # no sign of any


def test_a_thousand_guests_that_came_and_went_leave_a_summary_that_can_be_read(tmp_path: Path) -> None:
    names = [f"engine-{number}" for number in range(1_000)]
    rows = [Membership(name, "native", "here", 1, step, step, "drained") for step, name in enumerate(names)]
    proofs = tuple(Proof(name, "native float32", 1, 1e-6, 1e-5, 1e-7, True) for name in names)
    with run_at(tmp_path / "run") as (_, ledger):
        ledger.put(ENGINES, [Membership("engine-here", "native", "here", 9, 0), *rows])
        ledger.put(CANARY, CanaryRecord(newest=proofs, worst=proofs))
        generated, busy = dict.fromkeys(names, 3), dict.fromkeys(names, 2.0)
        ledger.put(TOTALS, Totals(max_staleness=None, rl_seconds=9.0, generated_by=generated, busy=busy))
    output = io.StringIO()
    Console(file=output, width=100).print(summary_table(inspect_run(tmp_path / "run"), "a run"))
    lines = output.getvalue().splitlines()
    assert len(lines) < 70
    assert any("992 engines  that have left before, 2,976 tokens" in line for line in lines)
    assert sum("engine-here" in line for line in lines) == 1
    assert sum("engine-999" in line for line in lines) == 4  # it left last: its row, its canary, its time twice


def test_the_json_is_one_object_and_nothing_else(finished_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    print_inspection(finished_run, as_json=True)
    found = json.loads(capsys.readouterr().out)
    assert (found["final_accuracy"], found["busy"]) == (0.96, {"trainer": 0.8})
    print_inspection(finished_run)
    assert "held-out accuracy" in capsys.readouterr().out


@given(st.floats(-2, 2), st.integers(1, 30))
def test_a_bar_is_always_as_wide_as_its_place(fraction: float, width: int) -> None:
    assert len(bar(fraction, width)) == width


@given(st.lists(st.floats(0, 1), min_size=1, max_size=200), st.integers(1, 60))
def test_a_sparkline_is_never_wider_than_its_place(values: list[float], width: int) -> None:
    assert len(sparkline(values, width)) == min(width, len(values))
