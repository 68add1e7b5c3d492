"""Display of a running command: a panel on a terminal, plain lines elsewhere."""

from __future__ import annotations

import itertools
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Protocol, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from stretto.core.errors import harmless, several
from stretto.core.events import SupervisedProgress
from stretto.store.inspection import CanaryProof
from stretto.store.series.metrics import EvaluationLine, StepMetrics
from stretto.store.series.progress import clock
from stretto_report.dashboard.terminal.characters import is_ascii, open_console
from stretto_report.dashboard.terminal.snapshot import TRAINING, Snapshot, Watcher
from stretto_report.dashboard.terminal.summary import bar, canary_rows

_LEVELS, _ASCII_LEVELS = "▁▂▃▄▅▆▇█", "_.-:=+*#"
_TREND_WIDTH = 60
_FRAME = 4  # columns of the panel's border and padding
_NARROW = 72  # columns: below, facts and work stand one below the other
_PROOFS = 8  # most canary proofs that are shown
_FRACTIONS = frozenset({"accuracy", "held-out"})  # drawn between 0 and 1


def panel(
    snapshot: Snapshot,
    alarms: Sequence[str] = (),
    proofs: Sequence[CanaryProof] = (),
    *,
    title: str = "stretto",
    width: int = 80,
    ascii_only: bool = False,
) -> RenderableType:
    """Make a rich panel of a snapshot for a terminal of `width` columns, with `title` on its frame: progress, the lines
    of `alarms`, trends, measurements, busy roles and rates, and the first eight canary `proofs`. `ascii_only`: without
    other characters."""
    progress = Table.grid(expand=True)
    progress.add_row(_header(snapshot))
    progress.add_row(ProgressBar(total=max(snapshot.steps, 1), completed=min(snapshot.step, max(snapshot.steps, 1))))
    parts: list[RenderableType] = [progress]
    parts += [Text(harmless(alarm, ascii_only), style="bold red", overflow="fold") for alarm in alarms]
    if snapshot.trends:
        parts.append(_courses(snapshot.trends, width - _FRAME, ascii_only))
    facts, work = (_rows(rows, ascii_only) for rows in (snapshot.facts, _work(snapshot, ascii_only)))
    if width < _NARROW:
        parts += [facts, work]
    else:
        columns = Table.grid(padding=(0, 4, 0, 0))
        columns.add_row(facts, work)
        parts.append(columns)
    if proofs:
        parts.append(_rows(canary_rows(proofs[:_PROOFS]), ascii_only))
        if len(proofs) > _PROOFS:
            parts.append(Text(f"{several(len(proofs) - _PROOFS, 'more proof')}: stretto inspect", style="dim"))
    return Panel(Group(*parts), title=Text(harmless(title, ascii_only)), title_align="left", border_style="dim")


def sparkline(values: Sequence[float], width: int, levels: str = _LEVELS) -> str:
    """Draw fractions between 0 and 1 as at most `width` small bars, one character each. `levels`: characters of the
    bars, ascending. If there are more values, neighbours are averaged. `values` must not be empty.

    >>> sparkline([0.0, 0.5, 1.0], width=8), sparkline([0.0, 0.0, 1.0, 1.0], width=2)
    ('▁▅█', '▁█')
    """
    width = min(width, len(values))
    cuts = [round(index * len(values) / width) for index in range(width + 1)]
    means = [sum(values[start:end]) / (end - start) for start, end in itertools.pairwise(cuts)]
    return "".join(levels[min(len(levels) - 1, int(max(0.0, mean) * len(levels)))] for mean in means)


def _courses(trends: Mapping[str, Sequence[float]], width: int, ascii_only: bool) -> Table:
    """Make a table with one line for each trend: small bars between its minimum (at most 0) and its maximum, and these
    two numbers. Accuracies are drawn between 0 and 1, without numbers. `ascii_only`: without other characters."""
    table = Table.grid(padding=(0, 1, 0, 0))
    table.add_column(style="dim", overflow="fold")
    labels = max(map(len, trends)) + 1
    for name, values in trends.items():
        low, high = (0.0, 1.0) if name in _FRACTIONS else (min(0.0, *values), max(values))
        span = high - low or 1.0
        ends = "" if name in _FRACTIONS else f" {low:.3g} to {high:.3g}"
        room = max(1, min(_TREND_WIDTH, width - labels - len(ends)))
        bars = sparkline([(value - low) / span for value in values], room, _ASCII_LEVELS if ascii_only else _LEVELS)
        table.add_row(Text(harmless(name, ascii_only)), Text.assemble((bars, "green"), (ends, "dim")))
    return table


def _header(snapshot: Snapshot) -> Text:
    left = snapshot.remaining
    rest = "" if left is None else f", about {clock(left)} left"
    step = (f"{snapshot.step}/{snapshot.steps}", "bold")
    return Text.assemble(f"{snapshot.phase} ", step, f"   {clock(snapshot.seconds)} elapsed{rest}", overflow="fold")


def _rows(rows: Iterable[tuple[str, str | Text]], ascii_only: bool) -> Table:
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(style="dim", overflow="fold")
    table.add_column(overflow="fold")
    for name, value in rows:
        shown = value if isinstance(value, Text) else Text(harmless(value, ascii_only))
        table.add_row(Text(harmless(name, ascii_only)), shown)
    return table


def _work(snapshot: Snapshot, ascii_only: bool) -> Iterator[tuple[str, str | Text]]:
    for role, fraction in snapshot.busy.items():
        done = ("#" * round(16 * max(0.0, min(1.0, fraction)))).ljust(16) if ascii_only else bar(fraction, 16)
        yield role, Text.assemble((done, "blue"), f" {fraction:4.0%}")
    yield from ((what, f"{rate:,.0f} tokens/s") for what, rate in snapshot.tokens_per_second.items())


_PANEL_SECONDS = 0.5
_LINE_SECONDS = 5.0
_ALARM_SECONDS = 5.0


class _Alarms(Protocol):
    """Source of alarms for a display; `audit.alarms.AlarmWatch` is one (Protocol)."""

    def step(self, metrics: StepMetrics) -> None:
        """Add a step's measurements; called for each step, so it must be cheap."""

    def evaluated(self, evaluation: EvaluationLine) -> None: ...

    def sentences(self) -> Mapping[str, str]:
        """Return the line of each alarm that fires now, by its title; called every few seconds."""


#: Returns the current canary proofs; called for each drawing, at most twice a second.
Proofs = Callable[[], Sequence[CanaryProof]]


def open_display(
    steps: int,
    console: Console | None = None,
    alarms: _Alarms | None = None,
    title: str = "stretto",
    proofs: Proofs = tuple,
    verbose: bool = False,
    note: Callable[[str], None] = lambda line: None,
) -> Display:
    """Make the display of a run of `steps` training steps (0: not known), to be used as a context manager. On a
    terminal it is a panel with `title` and the canary `proofs` of the engines. Elsewhere it prints lines, with all
    measurements if `verbose`. `console`: None: standard output. `alarms`: None: no alarms are shown. `note` gets the
    line of each alarm that begins to fire.

    Example::

        with open_display(recipe.trainer.steps) as display:
            display.say("warm start")
            display.step(metrics)
    """
    console = console or open_console()
    if console.is_terminal and not console.is_dumb_terminal:
        display: Display = _PanelDisplay(steps, console, alarms, title, proofs)
    else:
        display = LineDisplay(steps, console, alarms=alarms, verbose=verbose)
    display.note = note
    return display


class Display(ABC):
    """Display of a run: shows the newest snapshot, at most once in `seconds`, and a last time at the end of the block
    (context manager). Texts are escaped for the terminal."""

    def __init__(self, steps: int, console: Console, seconds: float, alarms: _Alarms | None) -> None:
        self._watcher = Watcher(steps)
        self._console, self._ascii_only = console, is_ascii(console)
        self._seconds = seconds
        self._phase: str | None = None
        self._is_new, self._drawn = False, float("-inf")  # whether there is something to draw; when something was drawn
        self._alarms, self._alarmed = alarms, float("-inf")
        self._sentences: Mapping[str, str] = {}
        self.note: Callable[[str], None] = lambda line: None  #: gets the line of each alarm that begins to fire

    def say(self, text: str) -> None:
        """Print a line that stays on the screen, then `refresh`."""
        self._print(text)
        self.refresh()

    def _print(self, text: str) -> None:
        self._console.print(harmless(text, self._ascii_only), highlight=False, markup=False, soft_wrap=True)

    @abstractmethod
    def _draw(self, snapshot: Snapshot, fresh: Mapping[str, str], again: bool) -> None:
        """Draw a snapshot. `again`: it was drawn before. `fresh`: lines, by title, of the alarms that began to fire
        since they were last asked for."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._alarmed = float("-inf")
        self._finish()

    def learning(self, progress: SupervisedProgress) -> None:
        """Take the progress of supervised training, and draw it if the last drawing is long enough ago, or at once if
        this is the first progress of a later phase or the last step of its phase."""
        another = self._enter(progress.phase)
        self._watcher.learning(progress)
        self._changed(another or progress.step == progress.steps)

    def step(self, metrics: StepMetrics) -> None:
        """Take the measurements of one training step, and draw them if the last drawing is long enough ago, or at once
        if another phase ends with this step."""
        another = self._enter(TRAINING)
        self._watcher.step(metrics)
        if self._alarms is not None:
            self._alarms.step(metrics)
        self._changed(another)

    def evaluated(self, evaluation: EvaluationLine) -> None:
        """Take a held-out evaluation, and draw it if the last drawing is long enough ago. Before the first training
        step, nothing is drawn: the evaluation is shown with that step."""
        if self._alarms is not None:
            self._alarms.evaluated(evaluation)
        if self._watcher.evaluated(evaluation):
            self._changed(self._enter(TRAINING))

    def _enter(self, phase: str) -> bool:
        """Begin `phase`. Return whether another phase came before; its last snapshot is drawn now."""
        another = self._phase not in (None, phase)
        if another:
            self._finish()
        self._phase = phase
        return another

    def refresh(self) -> None:
        """Draw what is new, alarms included, if the last drawing is long enough ago: 0.5 s for a panel, 5 s for lines;
        else do nothing. Called regularly, because a run may be silent for long."""
        if time.monotonic() - self._drawn >= self._seconds:
            self._finish()

    def _changed(self, at_once: bool) -> None:
        self._is_new = True
        if at_once:
            self._finish()
        self.refresh()

    def _finish(self) -> None:
        before, snapshot = self._sentences, self._watcher.snapshot
        if self._alarms is not None and time.monotonic() - self._alarmed >= _ALARM_SECONDS:
            self._sentences, self._alarmed = self._alarms.sentences(), time.monotonic()
        fresh = {title: line for title, line in self._sentences.items() if title not in before}
        for line in fresh.values():
            self.note(line)
        if snapshot is None:
            for line in fresh.values():
                self._print(line)
        elif self._is_new or self._sentences != before:
            again, self._is_new, self._drawn = not self._is_new, False, time.monotonic()
            self._draw(snapshot, fresh, again)


class _PanelDisplay(Display):
    """Display as a panel on a terminal, drawn at most twice a second to save CPU time."""

    def __init__(self, steps: int, console: Console, alarms: _Alarms | None, title: str, proofs: Proofs) -> None:
        super().__init__(steps, console, _PANEL_SECONDS, alarms)
        self._title, self._proofs = title, proofs
        self._live = Live(console=console, auto_refresh=False)

    def _draw(self, snapshot: Snapshot, fresh: Mapping[str, str], again: bool) -> None:
        shown = panel(
            snapshot,
            tuple(self._sentences.values()),
            self._proofs(),
            title=self._title,
            width=self._console.width,
            ascii_only=self._ascii_only,
        )
        self._live.update(shown, refresh=True)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        try:
            super().__exit__()
        finally:
            self._live.stop()


class LineDisplay(Display):
    """Display as plain lines: one every few seconds, one at the end of each phase, one for each new alarm. `verbose`:
    with lines of all measurements."""

    def __init__(
        self,
        steps: int,
        console: Console,
        seconds: float = _LINE_SECONDS,
        alarms: _Alarms | None = None,
        verbose: bool = False,
    ) -> None:
        super().__init__(steps, console, seconds, alarms)
        self._verbose = verbose

    def _draw(self, snapshot: Snapshot, fresh: Mapping[str, str], again: bool) -> None:
        course = [] if again else [snapshot.line, *(snapshot.details() if self._verbose else ())]
        for line in [*course, *fresh.values()]:
            self._print(line)
