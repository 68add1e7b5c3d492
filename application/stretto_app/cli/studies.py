"""``stretto study``: one recipe in several settings, over several seeds."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from stretto_app.cli.mistakes import refuse_file


def study(
    study: Annotated[
        str, typer.Argument(metavar="FILE.toml|NAME", help="A study, or the name of one that comes with stretto.")
    ],
    out: Annotated[Path | None, typer.Option(help="Folder of the study [default: studies/NAME].")] = None,
    seeds: Annotated[int | None, typer.Option(min=1, max=1000, help="Runs of each cell.")] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Training steps of each run.")] = None,
    jobs: Annotated[int | None, typer.Option(min=1, max=64, help="Runs at a time [default: what cores carry].")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Train a recipe in several settings, over several seeds: a table with 95 % intervals, JSON and a picture.

    A study that was stopped goes on when it is started again; finished runs are kept.
    """
    if (path := Path(study)).suffix == ".toml":
        refuse_file(path)
    import msgspec

    from stretto_app.study.command import perform
    from stretto_app.study.summary import table

    result, code = perform(study, out, seeds, steps, jobs)
    print(msgspec.json.encode(result).decode() if json else table(result))
    raise typer.Exit(code)
