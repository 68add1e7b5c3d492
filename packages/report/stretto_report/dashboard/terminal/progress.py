"""Display of a running command: a panel on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Protocol, Self

from rich.console import Console
from rich.live import Live

from stretto.core.events import SupervisedProgress
from stretto.store.inspection import CanaryProof
from stretto.store.series.metrics import EvaluationLine, StepMetrics
from stretto_report.dashboard.terminal.characters import harmless, is_ascii, open_console
from stretto_report.dashboard.terminal.panel import panel
from stretto_report.dashboard.terminal.snapshot import TRAINING, Snapshot, Watcher

_PANEL_SECONDS = 0.5
_LINE_SECONDS = 5.0
_ALARM_SECONDS = 5.0


class Alarms(Protocol):
    """Source of alarms for a display; `audit.alarms.AlarmWatch` is one (Protocol)."""

    def step(self, metrics: StepMetrics) -> None:
        """Take a step's measurements; called for each step, so it must be cheap."""

    def evaluated(self, evaluation: EvaluationLine) -> None: ...

    def sentences(self) -> Mapping[str, str]:
        """Line of each current alarm, by its title; called every few seconds."""


#: Returns the current canary proofs; called for each drawing, at most twice a second.
Proofs = Callable[[], Sequence[CanaryProof]]


class _NoAlarms:
    def step(self, metrics: StepMetrics) -> None: ...

    def evaluated(self, evaluation: EvaluationLine) -> None: ...

    def sentences(self) -> Mapping[str, str]:
        return {}


def open_display(
    steps: int,
    console: Console | None = None,
    alarms: Alarms | None = None,
    title: str = "stretto",
    proofs: Proofs = tuple,
    verbose: bool = False,
) -> Display:
    """Open the display of a run of `steps` training steps (context manager). On a terminal it is a panel, with the
    canary `proofs` of the engines. Elsewhere it prints lines, with all measurements if `verbose`.

    Example::

        with open_display(recipe.trainer.steps) as display:
            display.say("warm start")
            display.step(metrics)
    """
    console = console or open_console()
    alarms = alarms or _NoAlarms()
    if console.is_terminal and not console.is_dumb_terminal:
        return PanelDisplay(steps, console, alarms, title, proofs)
    return LineDisplay(steps, console, alarms=alarms, verbose=verbose)


class Display(ABC):
    """Shows the newest snapshot at a limited rate (context manager). Texts are escaped for the terminal."""

    def __init__(self, steps: int, console: Console, seconds: float, alarms: Alarms) -> None:
        self._watcher = Watcher(steps)
        self._console, self._ascii_only = console, is_ascii(console)
        self._seconds = seconds
        self._phase: str | None = None
        self._is_new, self._drawn = False, float("-inf")  # whether there is something to draw; when something was drawn
        self._alarms, self._alarmed = alarms, float("-inf")
        self._sentences: Mapping[str, str] = {}

    def say(self, text: str) -> None:
        """Show a line that stays on the screen."""
        self._console.print(harmless(text, self._ascii_only), highlight=False, markup=False, soft_wrap=True)

    @abstractmethod
    def _draw(self, snapshot: Snapshot, fresh: Mapping[str, str]) -> None:
        """Draw a snapshot. `fresh`: lines of alarms that are new since the last drawing, by title."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._alarmed = float("-inf")
        self._finish()

    def learning(self, progress: SupervisedProgress) -> None:
        """Show the progress of supervised training."""
        another = self._enter(progress.phase)
        self._watcher.learning(progress)
        self._changed(another)

    def step(self, metrics: StepMetrics) -> None:
        """Show the measurements of one training step."""
        another = self._enter(TRAINING)
        self._watcher.step(metrics)
        self._alarms.step(metrics)
        self._changed(another)

    def evaluated(self, evaluation: EvaluationLine) -> None:
        """Show the held-out accuracy."""
        self._alarms.evaluated(evaluation)
        if self._watcher.evaluated(evaluation):
            self._changed(self._enter(TRAINING))

    def _enter(self, phase: str) -> bool:
        """Begin `phase`. If another phase was shown, draw its last snapshot; return whether this was so."""
        another = self._phase not in (None, phase)
        if another:
            self._finish()
        self._phase = phase
        return another

    def refresh(self) -> None:
        """Draw new measurements if enough time has passed. Call it regularly, because a run may be silent for long."""
        if time.monotonic() - self._drawn >= self._seconds:
            self._finish()

    def _changed(self, at_once: bool) -> None:
        self._is_new = True
        if at_once:
            self._finish()
        self.refresh()

    def _finish(self) -> None:
        """Draw the newest snapshot unless it is already shown."""
        if self._is_new and (snapshot := self._watcher.snapshot) is not None:
            before, self._is_new = self._sentences, False
            if time.monotonic() - self._alarmed >= _ALARM_SECONDS:
                self._sentences, self._alarmed = self._alarms.sentences(), time.monotonic()
            self._drawn = time.monotonic()
            self._draw(snapshot, {title: line for title, line in self._sentences.items() if title not in before})


class PanelDisplay(Display):
    """Panel that is drawn at most twice a second, to save CPU time."""

    def __init__(self, steps: int, console: Console, alarms: Alarms, title: str, proofs: Proofs = tuple) -> None:
        super().__init__(steps, console, _PANEL_SECONDS, alarms)
        self._title, self._proofs = title, proofs
        self._live = Live(console=console, auto_refresh=False)

    def _draw(self, snapshot: Snapshot, fresh: Mapping[str, str]) -> None:
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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            super().__exit__(kind, error, trace)
        finally:
            self._live.stop()


class LineDisplay(Display):
    """Prints plain lines: one every few seconds, one at the end of each phase, one for each new alarm."""

    def __init__(
        self,
        steps: int,
        console: Console,
        seconds: float = _LINE_SECONDS,
        alarms: Alarms | None = None,
        verbose: bool = False,
    ) -> None:
        super().__init__(steps, console, seconds, alarms or _NoAlarms())
        self._verbose = verbose

    def _draw(self, snapshot: Snapshot, fresh: Mapping[str, str]) -> None:
        self.say(snapshot.line)
        for line in [*(snapshot.details() if self._verbose else ()), *fresh.values()]:
            self.say(line)
