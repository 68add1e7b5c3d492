"""`stretto export` on the command line."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

_Format = Literal["jsonl", "parquet", "csv"]


def export(
    run: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="A run folder.")],
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The file to write.")],
    format: Annotated[
        _Format | None, typer.Option("--format", help="Of the file [default: by its suffix, else jsonl].")
    ] = None,
    trace: Annotated[
        bool, typer.Option("--trace", help="Write the timeline in place of the trajectories, for Perfetto.")
    ] = False,
) -> None:
    """Write every trajectory of a run, one a row: tokens, log-probabilities, versions, verdict and final state; or its
    timeline."""
    from stretto.store.export import export_run
    from stretto.store.trace import export_trace

    if trace and format is not None:
        raise typer.BadParameter("--trace writes the timeline as JSON: leave --format out")
    if trace:
        print(f"{export_trace(run, file):,} events written to {file}")
        return
    print(f"{export_run(run, file, format):,} trajectories written to {file}")
