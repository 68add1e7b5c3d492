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
) -> None:
    """Write every trajectory of a run, one a row: tokens, log-probabilities, versions, verdict and final state."""
    from stretto.store.export import export_run

    print(f"{export_run(run, file, format):,} trajectories written to {file}")
