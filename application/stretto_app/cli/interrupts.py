"""Ctrl-C in the first seconds of a command, before a run handles it: one line, exit code 130, nothing left."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, NoReturn

import typer
from typer.core import TyperGroup

if TYPE_CHECKING:
    from stretto.processes.spawn import Spawner

_STOPPED, _STOPPED_CODE = "stretto: stopped by Ctrl-C", 128 + signal.SIGINT


class Commands(TyperGroup):
    """Command group in which Ctrl-C, unless a run handles it, ends with one line."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            print(_STOPPED, file=sys.stderr)
            raise typer.Exit(_STOPPED_CODE) from None


@contextmanager
def importing() -> Iterator[None]:
    """Within the block (imports), Ctrl-C ends the process at once, and the kernel ends its fork server: an interrupted
    import may raise another error, or continue."""

    def end(number: int, frame: object) -> NoReturn:
        os.write(2, f"{_STOPPED}\n".encode())
        os._exit(_STOPPED_CODE)

    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:
        signal.signal(signal.SIGINT, end)
    try:
        from stretto.processes.imports import quick_imports

        with quick_imports():
            yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def forking(modules: Sequence[str] = ()) -> Iterator[Spawner]:
    """Fork server for the command, forked after the imports of its roles' libraries and `modules`."""
    with ExitStack() as ends:
        with importing():
            from stretto.processes.fork_server_role import fork_server

            spawner = ends.enter_context(fork_server(modules))
        yield spawner
