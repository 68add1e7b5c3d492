"""`stretto watch` on the command line."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Optional

import typer


def watch(
    folders: Annotated[
        Optional[list[Path]],  # noqa: UP045 - as above
        typer.Argument(metavar="[RUNS_DIR|RUN_DIR]...", help="Folders of runs [default: runs]."),
    ] = None,
    host: Annotated[
        str, typer.Option(help="Address to listen on; beyond loopback with a password in STRETTO_WATCH_PASSWORD.")
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
