"""Ctrl-C in the first seconds of a command, before a run listens to it: one line, exit code 130, nothing is left."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, NoReturn

import typer
from typer.core import TyperGroup

if TYPE_CHECKING:
    from stretto.processes.spawn import Spawner

_STOPPED, _STOPPED_CODE = "stretto: stopped by Ctrl-C", 128 + signal.SIGINT


class Commands(TyperGroup):
    """Ctrl-C before a run listens to it, or in another command, ends with one line."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            print(_STOPPED, file=sys.stderr)
            raise typer.Exit(_STOPPED_CODE) from None


@contextmanager
def importing() -> Iterator[None]:
    """Ctrl-C ends the process at once, and the kernel its fork server: a library that is interrupted while it is
    imported may raise an error of its own, or go on. No garbage is looked for: modules are none, and to go through
    them again and again is a fifth of what imports take."""

    def end(number: int, frame: object) -> NoReturn:
        os.write(2, f"{_STOPPED}\n".encode())
        os._exit(_STOPPED_CODE)

    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:
        signal.signal(signal.SIGINT, end)
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        signal.signal(signal.SIGINT, before)


@contextmanager
def forking() -> Iterator[Spawner]:
    """A fork server of the command, which imports the libraries of its roles while the command imports its own."""
    with ExitStack() as ends:
        with importing():
            from stretto.processes.fork_server import fork_server

            spawner = ends.enter_context(fork_server())
        yield spawner
