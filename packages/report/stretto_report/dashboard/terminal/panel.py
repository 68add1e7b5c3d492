"""The panel of a snapshot on a terminal."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from stretto.store.inspection import CanaryProof
from stretto.store.series.progress import clock
from stretto_report.dashboard.terminal.characters import harmless
from stretto_report.dashboard.terminal.snapshot import Snapshot
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
    """Rich panel of a snapshot for a terminal of `width` columns: progress, `alarms`, trends, measurements, busy roles
    and rates, and canary `proofs`."""
    progress = Table.grid(expand=True)
    progress.add_row(_header(snapshot))
    progress.add_row(ProgressBar(total=max(snapshot.steps, 1), completed=min(snapshot.step, max(snapshot.steps, 1))))
    parts: list[RenderableType] = [progress]
    parts += [Text(harmless(alarm, ascii_only), style="bold red", overflow="fold") for alarm in alarms]
    if snapshot.trends:
        parts.append(_courses(snapshot.trends, width - _FRAME, ascii_only))
    facts, work = _rows(snapshot.facts, ascii_only), _work(snapshot, ascii_only)
    if width < _NARROW:
        parts += [facts, work]
    else:
        columns = Table.grid(padding=(0, 4, 0, 0))
        columns.add_row(facts, work)
        parts.append(columns)
    if proofs:
        parts.append(_rows(list(canary_rows(proofs[:_PROOFS])), ascii_only))
        if len(proofs) > _PROOFS:
            parts.append(Text(f"{len(proofs) - _PROOFS} more proofs: stretto inspect", style="dim"))
    return Panel(Group(*parts), title=Text(harmless(title, ascii_only)), title_align="left", border_style="dim")


def sparkline(values: Sequence[float], width: int, levels: str = _LEVELS) -> str:
    """Fractions between 0 and 1 as at most `width` small bars. If there are more values, neighbours are averaged.

    >>> sparkline([0.0, 0.5, 1.0], width=8), sparkline([0.0, 0.0, 1.0, 1.0], width=2)
    ('▁▅█', '▁█')
    """
    width = min(width, len(values))
    cuts = [round(index * len(values) / width) for index in range(width + 1)]
    means = [sum(values[start:end]) / (end - start) for start, end in itertools.pairwise(cuts)]
    return "".join(levels[min(len(levels) - 1, int(max(0.0, mean) * len(levels)))] for mean in means)


def _courses(trends: Mapping[str, Sequence[float]], width: int, ascii_only: bool) -> Table:
    """One line for each trend: small bars from its minimum (at most 0) to its maximum, and these two numbers."""
    table = Table.grid(padding=(0, 1, 0, 0))
    table.add_column(style="dim", overflow="fold")
    labels = max(map(len, trends)) + 1
    for name, values in trends.items():
        low, high = (0.0, 1.0) if name in _FRACTIONS else (min(0.0, *values), max(values))
        span = high - low or 1.0
        ends = "" if name in _FRACTIONS else f" {low:.3g} to {high:.3g}"
        room = max(1, min(_TREND_WIDTH, width - labels - len(ends)))
        bars = sparkline([(value - low) / span for value in values], room, _ASCII_LEVELS if ascii_only else _LEVELS)
        table.add_row(name, Text.assemble((bars, "green"), (ends, "dim")))
    return table


def _header(snapshot: Snapshot) -> Text:
    left = snapshot.remaining
    rest = "" if left is None else f", about {clock(left)} left"
    step = (f"{snapshot.step}/{snapshot.steps}", "bold")
    return Text.assemble(f"{snapshot.phase} ", step, f"   {clock(snapshot.seconds)} elapsed{rest}", overflow="fold")


def _rows(rows: Sequence[tuple[str, str]], ascii_only: bool) -> Table:
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(style="dim", overflow="fold")
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(Text(harmless(name, ascii_only)), Text(harmless(value, ascii_only)))
    return table


def _work(snapshot: Snapshot, ascii_only: bool) -> Table:
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(style="dim", overflow="fold")
    table.add_column(overflow="fold")
    for role, fraction in snapshot.busy.items():
        done = ("#" * round(16 * max(0.0, min(1.0, fraction)))).ljust(16) if ascii_only else bar(fraction, 16)
        table.add_row(Text(harmless(role, ascii_only)), Text.assemble((done, "blue"), f" {fraction:4.0%}"))
    for what, rate in snapshot.tokens_per_second.items():
        table.add_row(what, f"{rate:,.0f} tokens/s")
    return table
