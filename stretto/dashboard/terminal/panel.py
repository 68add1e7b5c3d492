"""The panel of a snapshot on a terminal."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from stretto.dashboard.terminal.snapshot import Snapshot
from stretto.dashboard.terminal.summary import bar

_LEVELS = "▁▂▃▄▅▆▇█"
_TREND_WIDTH = 60


def panel(snapshot: Snapshot) -> RenderableType:
    """Progress, measurements, busy roles and rates of a snapshot."""
    progress = Table.grid(expand=True)
    progress.add_row(_header(snapshot))
    progress.add_row(ProgressBar(total=max(snapshot.steps, 1), completed=snapshot.step))
    parts: list[RenderableType] = [progress]
    if len(snapshot.trend) > 1:
        parts.append(Text.assemble(("accuracy ", "dim"), (sparkline(snapshot.trend, _TREND_WIDTH), "green")))
    columns = Table.grid(padding=(0, 4, 0, 0))
    columns.add_row(_facts(snapshot), _work(snapshot))
    return Panel(Group(*parts, columns), title="stretto", title_align="left", border_style="dim")


def sparkline(values: Sequence[float], width: int) -> str:
    """Fractions between 0 and 1 as a row of at most `width` little bars, neighbours averaged.

    >>> sparkline([0.0, 0.5, 1.0], width=8), sparkline([0.0, 0.0, 1.0, 1.0], width=2)
    ('▁▅█', '▁█')
    """
    width = min(width, len(values))
    cuts = [round(index * len(values) / width) for index in range(width + 1)]
    means = [sum(values[start:end]) / (end - start) for start, end in itertools.pairwise(cuts)]
    return "".join(_LEVELS[min(len(_LEVELS) - 1, int(max(0.0, mean) * len(_LEVELS)))] for mean in means)


def _header(snapshot: Snapshot) -> Text:
    left = snapshot.remaining
    rest = "" if left is None else f", about {_clock(left)} left"
    step = (f"{snapshot.step}/{snapshot.steps}", "bold")
    return Text.assemble(f"{snapshot.phase} ", step, f"   {_clock(snapshot.seconds)} elapsed{rest}")


def _facts(snapshot: Snapshot) -> Table:
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(style="dim")
    for name, value in snapshot.facts:
        table.add_row(name, value)
    return table


def _work(snapshot: Snapshot) -> Table:
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(style="dim")
    for role, fraction in snapshot.busy.items():
        table.add_row(role, Text.assemble((bar(fraction, 16), "blue"), f" {fraction:4.0%}"))
    for what, rate in snapshot.tokens_per_second.items():
        table.add_row(what, f"{rate:,.0f} tokens/s")
    return table


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02d}"
