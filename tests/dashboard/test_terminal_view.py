"""What the view on a terminal shows beside the numbers, and what it can be shown on.

Promises: courses cost the same however long the run is; alarms are shown as soon as they hold, once on plain lines; an
alarm watch finds what the alarms of a whole run find; a terminal of ASCII gets ASCII, a narrow one no line too long;
what a model or a name may hold steers no terminal and is no markup.
"""

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from stretto.core.errors import harmless
from stretto.store.series.metrics import StepMetrics
from stretto_report.audit.alarms import AlarmWatch, findings_of
from stretto_report.audit.evidence import Evidence
from stretto_report.dashboard.terminal import progress
from stretto_report.dashboard.terminal.characters import AsciiConsole, is_ascii, is_ascii_locale, open_console
from stretto_report.dashboard.terminal.progress import LineDisplay, open_display
from stretto_report.dashboard.terminal.snapshot import Trend
from tests.store.lines import evaluation_line, step_line

HOSTILE = "[/]evil\x1b[2J\x07\u202e\x9b31m"
RECIPE = {"rollout": {"max_staleness": 4.0}, "trainer": {"steps": 100}}


def step(number: int, entropy: float | None = None, name: str = "format", **changed: Any) -> StepMetrics:
    """The entropy collapses at step 11, unless another one is given."""
    entropy = (1.0 if number <= 10 else 0.01) if entropy is None else entropy
    maps: dict[str, Any] = {"trainer": {"entropy": entropy, "loss": 0.1}, "busy": {name: 0.5, "trainer": 1.0}}
    maps |= {"rewards": {name: 0.25}, "queues": {"in_flight": 4.0}, "accuracy": number / 100, "reward": number / 200}
    return step_line(number, **(maps | {"staleness_mean": 0.5, "staleness_max": 1} | changed))


def drawn(console: Console, name: str, alarms: AlarmWatch | None = None, steps: int = 50) -> str:
    """What a display of a run has written."""
    with open_display(100, console, alarms, title=name) as display:
        display.say(name)
        for number in range(1, steps + 1):
            display.step(step(number, name=name))
        display.evaluated(evaluation_line(50))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@given(st.lists(st.floats(-1e6, 1e6), max_size=2_000))
def test_a_trend_is_bounded_and_goes_from_the_first_value_to_the_last(values: list[float]) -> None:
    trend = Trend()
    for value in values:
        trend.add(value)
        trend.add(None)
        trend.add(float("nan"))
    assert len(trend.points) <= 120
    if len(values) < 120:
        assert trend.points == tuple(values)
    elif values:
        assert min(values) - 1e-6 <= min(trend.points) <= max(trend.points) <= max(values) + 1e-6


def test_the_neighbours_of_a_full_trend_become_one() -> None:
    trend = Trend()
    for value in range(121):
        trend.add(float(value))
    assert trend.points == (*(2 * at + 0.5 for at in range(60)), 120.0)


def test_a_panel_has_courses_and_alarms(tmp_path: Path) -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=100, color_system=None)
    shown = drawn(console, "format", AlarmWatch(tmp_path, RECIPE))
    last = shown[shown.rindex("╭") :]
    assert "alarm  entropy collapse since step 19: the entropy fell from 1 to 0.01 nats" in last
    for words in ("accuracy", "reward", "staleness", "entropy", "▁", "█", "0 to 0.25"):
        assert words in last


def test_lines_have_an_alarm_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_ALARM_SECONDS", 0.0)
    output = io.StringIO()
    with LineDisplay(100, Console(file=output), seconds=0.0, alarms=AlarmWatch(tmp_path, RECIPE)) as display:
        for number in range(1, 31):
            display.step(step(number))
    lines = output.getvalue().splitlines()
    (at,) = [number for number, line in enumerate(lines) if line.startswith("alarm")]
    # twenty steps make two windows; by then the newer one is below a fifth of the older
    assert lines[at].startswith("alarm  entropy collapse since step 19")
    assert lines[at - 1].startswith("step 20/100 ")


@pytest.mark.parametrize("terminal", [False, True])
def test_each_alarm_that_is_shown_goes_to_the_log_once_also_one_of_the_last_moment(
    tmp_path: Path, terminal: bool
) -> None:
    noted, console = list[str](), Console(file=io.StringIO(), force_terminal=terminal, width=100)
    alarms = AlarmWatch(tmp_path, RECIPE)
    with open_display(100, console, alarms, note=noted.append) as display:
        display.refresh()  # the next look is in five seconds
        for number in range(1, 31):
            display.step(step(number))
        assert noted == []
    assert noted == [*alarms.sentences().values()] != []


def test_an_alarm_watch_finds_what_the_alarms_of_the_whole_run_find(tmp_path: Path) -> None:
    steps = [
        step(
            number,
            length_mean=10.0 if number <= 20 else 50.0,
            busy={"trainer": 0.4} | ({"engine-0": 0.0} if number > 5 else {}),
            staleness_mean=4.0,
        )
        for number in range(1, 61)
    ]
    watch = AlarmWatch(tmp_path, RECIPE | {"trainer": {"steps": 60}})
    for one in steps:
        watch.step(one)
    whole = Evidence.of(steps)
    expected = findings_of(Evidence(whole.steps, whole.series, (), 4.0, None, 60)).alarms
    assert watch.sentences() == {alarm.title: str(alarm) for alarm in expected}
    names = {"entropy_collapse", "length_explosion", "idle_role", "staleness_at_bound"}
    assert {alarm.name for alarm in expected} == names


@pytest.mark.parametrize("width", [20, 50, 120])
@pytest.mark.parametrize("ascii_only", [False, True])
def test_no_line_of_a_panel_is_wider_than_the_terminal(tmp_path: Path, width: int, ascii_only: bool) -> None:
    kind = AsciiConsole if ascii_only else Console
    console = kind(file=io.StringIO(), force_terminal=True, width=width, height=99, color_system=None)
    shown = drawn(console, "→ a run", AlarmWatch(tmp_path, RECIPE))
    last = shown[shown.rindex("+- " if ascii_only else "╭─ ") :].split("\x1b")[0]
    assert "".join(last.split()).count("entropy") >= 2  # in its course and its alarm
    assert max(map(len, last.splitlines())) <= width
    assert shown.isascii() is ascii_only


@pytest.mark.parametrize("terminal", [False, True])
def test_no_text_steers_the_terminal_or_is_markup(tmp_path: Path, terminal: bool) -> None:
    console = Console(file=io.StringIO(), force_terminal=terminal, width=200, height=99, color_system=None)
    shown = drawn(console, HOSTILE, AlarmWatch(tmp_path, {}))
    assert r"[/]evil\x1b[2J\x07\u202e\x9b31m" in shown
    assert not [one for one in ("\x1b[2J", "\x07", "\u202e", "\x9b") if one in shown]


@given(st.text())
def test_harmless_text_can_be_printed_and_is_plain_where_it_has_to_be(text: str) -> None:
    assert all(one.isprintable() or one == "\n" for one in harmless(text))
    assert harmless(text, ascii_only=True).isascii()


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, False),
        ({"LANG": "C"}, True),
        ({"LANG": "C", "LC_CTYPE": "C.UTF-8"}, True),  # Python has set the second one
        ({"LANG": "de_DE.UTF-8", "LC_CTYPE": "C.UTF-8"}, False),
        ({"LANG": "en_US.UTF-8", "LC_ALL": "POSIX"}, True),
        ({"LANG": "C.UTF-8"}, False),
    ],
)
def test_the_locale_says_what_the_terminal_can_print(environment: Mapping[str, str], expected: bool) -> None:
    assert is_ascii_locale(environment) is expected


def test_an_output_that_is_not_utf_8_gets_ascii(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LANG", "LC_ALL", "LC_CTYPE"):
        monkeypatch.delenv(name, raising=False)
    with io.TextIOWrapper(io.BytesIO(), "iso-8859-1") as latin, io.TextIOWrapper(io.BytesIO(), "utf-8") as unicode:
        assert is_ascii(open_console(latin))
        assert not is_ascii(open_console(unicode))
        monkeypatch.setenv("LANG", "C")
        assert is_ascii(open_console(unicode))
