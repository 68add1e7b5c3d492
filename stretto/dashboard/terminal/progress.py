"""What a run shows while it runs: a panel that renews itself, or plain lines where there is no terminal."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Protocol, Self

from rich.console import Console
from rich.live import Live

from stretto.dashboard.terminal.panel import panel
from stretto.dashboard.terminal.snapshot import Snapshot, WarmStartProgress, Watcher
from stretto.store.series.metrics import EvaluationLine, StepMetrics

_PANEL_SECONDS = 0.5
_LINE_SECONDS = 5.0


class Display(Protocol):
    """Where a run is watched; entered before the first thing is shown and left after the last."""

    def say(self, text: str) -> None:
        """Something that stays on the screen: what begins now, an engine that was replaced."""
        ...

    def learning(self, progress: WarmStartProgress) -> None:
        """One more look at the supervised warm start."""
        ...

    def step(self, metrics: StepMetrics) -> None:
        """One training step is done."""
        ...

    def evaluated(self, evaluation: EvaluationLine) -> None:
        """Held-out accuracy was measured."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


def open_display(steps: int, console: Console | None = None) -> Display:
    """A panel on a terminal, plain lines elsewhere, for a run of `steps` training steps.

    Example::

        with open_display(recipe.trainer.steps) as display:
            display.say("warm start")
            display.step(metrics)
    """
    console = console or Console()
    return PanelDisplay(steps, console) if console.is_terminal else LineDisplay(steps, console)


class _Display:
    """What both displays share: the newest snapshot, and a pace."""

    def __init__(self, steps: int, seconds: float) -> None:
        self._watcher = Watcher(steps)
        self._seconds = seconds
        self._newest: Snapshot | None = None
        self._drawn: tuple[float, Snapshot | None] = (float("-inf"), None)

    def learning(self, progress: WarmStartProgress) -> None:
        self._show(self._watcher.learning(progress))

    def step(self, metrics: StepMetrics) -> None:
        self._show(self._watcher.step(metrics))

    def evaluated(self, evaluation: EvaluationLine) -> None:
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
        """Draw the newest snapshot, unless it stands there already."""
        if self._newest is not None and self._newest is not self._drawn[1]:
            self._drawn = (time.monotonic(), self._newest)
            self._draw(self._newest)

    def _draw(self, snapshot: Snapshot) -> None:
        raise NotImplementedError


class PanelDisplay(_Display):
    """A panel that is drawn at most twice a second: the cores belong to the run."""

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
        self._finish()
        self._live.stop()


class LineDisplay(_Display):
    """One plain line every few seconds, and one for the last of each phase."""

    def __init__(self, steps: int, console: Console, seconds: float = _LINE_SECONDS) -> None:
        super().__init__(steps, seconds)
        self._console = console

    def say(self, text: str) -> None:
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    def _draw(self, snapshot: Snapshot) -> None:
        self.say(snapshot.line())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._finish()
