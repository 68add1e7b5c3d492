"""`stretto export`, `stretto watch` and `stretto study` on the command line: what became of runs."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Literal, Optional

import typer

from stretto.core.errors import several
from stretto_app.cli.mistakes import refuse_file

_Format = Literal["jsonl", "parquet", "csv"]
_TITLES = {"jsonl": "JSON lines", "parquet": "parquet", "csv": "CSV"}


def export(
    run: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="A run folder.")],
    file: Annotated[
        Path | None, typer.Argument(metavar="FILE", help="The file to write [default, and -: standard output].")
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
    from stretto_report.dashboard.trace import export_trace
    from stretto_report.reading.export import export_run, format_of, write_trajectories

    file = None if file == Path("-") else file
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
        print(f"{several(export_trace(run, file), 'event')} written to {file}")
        return
    written = format or format_of(file)
    print(f"{several(export_run(run, file, written), 'trajectory')} written to {file} as {_TITLES[written]}")


def watch(
    folders: Annotated[
        Optional[list[Path]],  # noqa: UP045 - as above
        typer.Argument(metavar="[RUNS_DIR|RUN_DIR]...", help="Folders of runs [default: runs]."),
    ] = None,
    host: Annotated[
        str,
        typer.Option(
            help="Address to listen on; an address other than loopback needs a password in STRETTO_WATCH_PASSWORD."
        ),
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65_535, help="Port to listen on; 0 takes a free one.")] = 8020,
    token: Annotated[
        str | None, typer.Option(help="Token that opens the pages [default: a new one for each start].")
    ] = None,
    no_open: Annotated[bool, typer.Option("--no-open", help="Open no browser.")] = False,
    allow_replay: Annotated[
        bool, typer.Option("--allow-replay", help="Let the page begin `stretto replay`, one at a time.")
    ] = False,
    replays: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder for the results of replays [default: in the cache].")
    ] = None,
    terminal: Annotated[
        bool, typer.Option("--terminal", help="Show one run here and serve nothing, until it ends; q leaves.")
    ] = False,
) -> None:
    """Show runs in the browser, live, finished or dead, until Ctrl-C; their folders are only read."""
    if terminal:
        from stretto_report.watch.terminal import watch_in_terminal

        watch_in_terminal(folders or [Path("runs")])
        return
    from stretto.core.machine import cache_folder
    from stretto_report.watch.serve import watch
    from stretto_report.watch.web.guard import PASSWORD

    watch(
        folders or [Path("runs")],
        host=host,
        port=port,
        token=token,
        password=os.environ.get(PASSWORD),
        opens=not no_open,
        say=lambda text: print(text, flush=True),
        replays=(replays or cache_folder() / "replays") if allow_replay else None,
    )


def study(
    study: Annotated[
        str, typer.Argument(metavar="FILE.toml|NAME", help="A study, or the name of one that comes with stretto.")
    ],
    out: Annotated[Path | None, typer.Option(help="Folder of the study [default: studies/NAME].")] = None,
    seeds: Annotated[
        int | None, typer.Option(min=1, max=1000, help="Seeds, one run each, of every setting [default: the study's].")
    ] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Training steps of each run [default: the study's].")] = None,
    jobs: Annotated[
        int | None, typer.Option(min=1, max=64, help="Runs at a time [default: as many as the cores carry].")
    ] = None,
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
