"""Ctrl-C in the first seconds of a command, before a run handles it: print one line and exit with code 130."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from stretto.processes.spawn import Spawner

STOPPED, STOPPED_CODE = "stretto: stopped by Ctrl-C", 128 + signal.SIGINT


@contextmanager
def importing() -> Iterator[None]:
    """Let Ctrl-C, unless it is handled, end the process at once during the block, which imports (context manager). An
    interrupted import might raise another error, or continue. The kernel ends the fork server with this process."""

    def end(number: int, frame: object) -> NoReturn:
        os.write(2, f"{STOPPED}\n".encode())
        os._exit(STOPPED_CODE)

    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:
        signal.signal(signal.SIGINT, end)
    try:
        from stretto_app.forking.imports import quick_imports

        with quick_imports():
            yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def forking(modules: Sequence[str] = ()) -> Iterator[Spawner]:
    """Context manager: the spawner of a command, whose fork server (`forking.role.fork_server`) has imported the
    libraries of a run's roles and `modules`. It ends after the block, with all that it has forked."""
    with ExitStack() as ends:
        with importing():
            from stretto_app.forking.role import fork_server

            spawner = ends.enter_context(fork_server(modules))
        yield spawner
