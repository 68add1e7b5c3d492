"""The group of commands: what it says of words that make no sense, and Ctrl-C in the first seconds of a command, before
a run handles it: one line, and exit code 130."""

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

_SENTENCE = 1000  # characters, at most
_STOPPED, _STOPPED_CODE = "stretto: stopped by Ctrl-C", 128 + signal.SIGINT


class Commands(TyperGroup):
    """Command group that ends on Ctrl-C with one line and exit code 130, unless a run handles it, and that says how
    settings are written where they were given as options, or the other way round."""

    def invoke(self, ctx: Any) -> Any:
        if signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN:  # as `heartbeat.keep_exit_codes`, without an import
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            print(_STOPPED, file=sys.stderr)
            raise typer.Exit(_STOPPED_CODE) from None
        except Exception as error:  # typer has no public name for mistakes of words
            _advise(error)
            raise

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """List the commands with the whole first sentence of each; typer cuts it off at the end of the line."""
        commands = [(name, self.get_command(ctx, name)) for name in self.list_commands(ctx)]
        with formatter.section("Commands"):
            formatter.write_dl([(name, one.get_short_help_str(_SENTENCE)) for name, one in commands if one is not None])


def _advise(error: Any) -> None:
    """Add to a mistake of words how the settings of its command are written."""
    context = getattr(error, "ctx", None)
    if context is None or not isinstance(said := getattr(error, "message", None), str):
        return
    names = {parameter.name for parameter in context.command.params}
    if "overrides" in names and hasattr(error, "possibilities"):
        error.message = f"{said}; settings are written without dashes, such as trainer.steps=100"
    elif "settings" in names and said.startswith("Got unexpected extra"):
        error.message = f"{said}; each setting has --set before it"


@contextmanager
def importing() -> Iterator[None]:
    """Let Ctrl-C end the process at once during the block, which imports (context manager). An interrupted import might
    raise another error, or continue. The kernel ends the fork server with this process."""

    def end(number: int, frame: object) -> NoReturn:
        os.write(2, f"{_STOPPED}\n".encode())
        os._exit(_STOPPED_CODE)

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
