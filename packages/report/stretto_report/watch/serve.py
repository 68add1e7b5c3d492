"""`stretto watch`: serve the pages from this process until Ctrl-C."""

from __future__ import annotations

import asyncio
import contextlib
import html
import secrets
import tempfile
import webbrowser
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType

from stretto.core.errors import Problem, RunFolderError
from stretto.processes.http.asgi import HostNames
from stretto.processes.http.reach import bind, names_loopback, url_of
from stretto.processes.http.server import HttpServer, settings_of
from stretto.store.run_folder import why_no_folder
from stretto_report.watch.runs.catalog import Catalog, is_run
from stretto_report.watch.web.app import Dashboard
from stretto_report.watch.web.guard import PASSWORD, Guard
from stretto_report.watch.web.replay import Replays

_SHORTEST_PASSWORD = 8
_SHUTDOWN_SECONDS = 1
_KEEP_ALIVE_SECONDS = 30


class _WatchServer(HttpServer):
    """HTTP server that a signal ends at once, with all open connections. The signal is not raised again."""

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.should_exit = self.force_exit = True


def watch(
    folders: Sequence[Path],
    *,
    host: str,
    port: int,
    token: str | None,
    password: str | None,
    opens: bool,
    say: Callable[[str], None],
    replays: Path | None = None,
) -> None:
    """Serve the pages of the runs in or below `folders`, as `Catalog` finds them, until a signal arrives. `say` gets a
    line with the address once the server listens.

    Args:
        token: secret for access on loopback, part of the address; None or "": one is generated.
        password: secret for access from other machines, needed if `host` is not loopback, and ignored if it is.
        port: 0: a free one.
        opens: open the address in a browser; ignored if `host` is not loopback.
        replays: folder for the results of replays started from the page, created if it is missing; its runs are served
            too. None: replays are forbidden.

    Raises:
        RunFolderError: a folder is missing, the address cannot be bound, the token cannot be part of an address, a
            password is needed and is missing or too short, or the folder for replays is in a run or cannot be created.
    """
    loopback = names_loopback(host)
    secret = _secret(host, loopback, token, password)
    _check_folders(folders)
    if replays is not None:
        replays = _folder_of_replays(replays)
        folders = [*folders, replays]
    bound = bind(host, port, ("--host", "--port"), RunFolderError)
    port = bound.getsockname()[1]
    shown = f"{url_of('127.0.0.1' if host in ('', '0.0.0.0') else host, port)}/"
    address = f"{shown}?token={secret}" if loopback else shown
    dashboard = Dashboard(Catalog(folders), Replays(replays))
    app = Guard(dashboard.app(), secret, port, HostNames(host, loopback=loopback))
    settings = settings_of(
        app,
        timeout_keep_alive=_KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=_SHUTDOWN_SECONDS,
        server_header=False,
    )
    bound.listen()
    say(f"stretto watch: {address}")
    with contextlib.ExitStack() as ending:
        if opens and loopback:
            folder = ending.enter_context(tempfile.TemporaryDirectory(prefix="stretto-watch-"))
            webbrowser.open(_way(Path(folder), address).as_uri())
        try:
            asyncio.run(_WatchServer(settings).serve([bound]))
        finally:
            dashboard.close()
            bound.close()


def _way(folder: Path, address: str) -> Path:
    """Write a private HTML page into `folder` that redirects to the address, and return its path. The browser opens
    this page, because all users of a machine can see a browser's command line, and with the address they would see the
    token."""
    page = folder / "open.html"
    page.touch(mode=0o600)
    line = f'<!doctype html><meta http-equiv="refresh" content="0; url={html.escape(address)}">\n'
    page.write_text(line, encoding="utf-8")
    return page


def _secret(host: str, loopback: bool, token: str | None, password: str | None) -> str:
    if not loopback:
        if password is None or len(password) < _SHORTEST_PASSWORD:
            found = "others than this machine may ask there, and there is no password"
            remedy = f"set {PASSWORD} to {_SHORTEST_PASSWORD} characters or more"
            raise RunFolderError([Problem(f"--host {host}", found, remedy)])
        return password
    found = token or secrets.token_urlsafe(24)
    if not found.isascii() or not found.isprintable() or any(character in found for character in " &#+%;"):
        raise RunFolderError([Problem("--token", "has characters that an address cannot hold", "letters and digits")])
    return found


def _check_folders(folders: Sequence[Path]) -> None:
    problems = [
        Problem(str(folder), fault, "give a run folder, or one of runs")
        for folder in folders
        if (fault := why_no_folder(folder))
    ]
    if problems:
        raise RunFolderError(problems)


def _folder_of_replays(folder: Path) -> Path:
    folder = folder.resolve()
    if inside := next((path for path in (folder, *folder.parents) if is_run(path)), None):
        found = f"is in the run folder {inside}, and the dashboard writes into no run"
        raise RunFolderError([Problem(f"--replays {folder}", found, "give another folder")])
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunFolderError([Problem(f"--replays {folder}", error.strerror or str(error), "give a folder")]) from error
    return folder
