"""`stretto export` on the command line."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

_Format = Literal["jsonl", "parquet", "csv"]
_TITLES = {"jsonl": "JSON lines", "parquet": "parquet", "csv": "CSV"}


def export(
    run: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="A run folder.")],
    file: Annotated[
        Path | None, typer.Argument(metavar="FILE", help="The file to write [default: standard output].")
    ] = None,
    format: Annotated[
        _Format | None, typer.Option("--format", help="Format of the file [default: by its suffix, else jsonl].")
    ] = None,
    trace: Annotated[
        bool, typer.Option("--trace", help="Write the timeline in place of the trajectories, for Perfetto.")
    ] = False,
) -> None:
    """Write every trajectory of a run, one per row: tokens, log-probabilities, versions, verdict and final state. With
    --trace, write its timeline instead."""
    from stretto.store.export import export_run, format_of, write_trajectories
    from stretto_report.dashboard.trace import export_trace

    if trace and format is not None:
        raise typer.BadParameter("--trace writes the timeline as JSON: leave --format out")
    if trace and file is None:
        raise typer.BadParameter("--trace writes a file: give FILE")
    if file is None and format == "parquet" and sys.stdout.isatty():
        raise typer.BadParameter("parquet is not for a terminal: give FILE")
    if file is None:
        write_trajectories(run, sys.stdout.buffer, format or "jsonl")
        return
    if trace:
        print(f"{export_trace(run, file):,} events written to {file}")
        return
    written = format or format_of(file)
    print(f"{export_run(run, file, written):,} trajectories written to {file} as {_TITLES[written]}")
