"""The display of a running command: a panel on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.live import Live

from stretto.dashboard.terminal.panel import panel
from stretto.dashboard.terminal.snapshot import Snapshot, WarmStartProgress, Watcher
from stretto.store.series.metrics import EvaluationLine, StepMetrics

_PANEL_SECONDS = 0.5
_LINE_SECONDS = 5.0


def open_display(steps: int, console: Console | None = None) -> Display:
    """The display of a run of `steps` training steps.

    Example::

        with open_display(recipe.trainer.steps) as display:
            display.say("warm start")
            display.step(metrics)
    """
    console = console or Console()
    return PanelDisplay(steps, console) if console.is_terminal else LineDisplay(steps, console)


class Display(ABC):
    """The newest snapshot, drawn at a limited rate; a context manager."""

    def __init__(self, steps: int, seconds: float) -> None:
        self._watcher = Watcher(steps)
        self._seconds = seconds
        self._newest: Snapshot | None = None
        self._drawn: tuple[float, Snapshot | None] = (float("-inf"), None)

    @abstractmethod
    def say(self, text: str) -> None:
        """Show a line that stays on the screen."""

    @abstractmethod
    def _draw(self, snapshot: Snapshot) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._finish()

    def learning(self, progress: WarmStartProgress) -> None:
        """Show the progress of supervised training."""
        self._show(self._watcher.learning(progress))

    def step(self, metrics: StepMetrics) -> None:
        """Show the measurements of one training step."""
        self._show(self._watcher.step(metrics))

    def evaluated(self, evaluation: EvaluationLine) -> None:
        """Show the held-out accuracy."""
        snapshot = self._watcher.evaluated(evaluation)
        if snapshot is not None:
            self._show(snapshot)

    def _show(self, snapshot: Snapshot) -> None:
        another = self._newest is not None and self._newest.phase != snapshot.phase
        if another:
            self._finish()
        self._newest = snapshot
        if another or time.monotonic() - self._drawn[0] >= self._seconds:
            self._finish()

    def _finish(self) -> None:
        """Draw the newest snapshot, unless it is shown already."""
        if self._newest is not None and self._newest is not self._drawn[1]:
            self._drawn = (time.monotonic(), self._newest)
            self._draw(self._newest)


class PanelDisplay(Display):
    """A panel, drawn at most twice a second to spare the cores."""

    def __init__(self, steps: int, console: Console) -> None:
        super().__init__(steps, _PANEL_SECONDS)
        self._live = Live(console=console, auto_refresh=False)

    def say(self, text: str) -> None:
        self._live.console.print(text, highlight=False, markup=False)

    def _draw(self, snapshot: Snapshot) -> None:
        self._live.update(panel(snapshot), refresh=True)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)
        self._live.stop()


class LineDisplay(Display):
    """One plain line every few seconds, and one at the end of each phase."""

    def __init__(self, steps: int, console: Console, seconds: float = _LINE_SECONDS) -> None:
        super().__init__(steps, seconds)
        self._console = console

    def say(self, text: str) -> None:
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    def _draw(self, snapshot: Snapshot) -> None:
        self.say(snapshot.line())
