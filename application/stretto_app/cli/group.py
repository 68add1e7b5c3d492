"""Class of the command groups: their list of commands, hints on misplaced words, and the message for Ctrl-C."""

from __future__ import annotations

import signal
import sys
from typing import Any

import typer
from typer.core import TyperGroup

from stretto_app.cli.interrupts import STOPPED, STOPPED_CODE

_SENTENCE = 1000  # characters, at most


class Commands(TyperGroup):
    """Command group that ends on Ctrl-C with one line and exit code 130, unless a run handles it. Its errors for an
    unknown option or an extra word add how the command's settings are written."""

    def invoke(self, ctx: Any) -> Any:
        if signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN:  # as `heartbeat.keep_exit_codes`, without an import
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            print(STOPPED, file=sys.stderr)
            raise typer.Exit(STOPPED_CODE) from None
        except Exception as error:  # typer has no public name for mistakes of words
            _advise(error)
            raise

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """List the commands with the whole first sentence of each; typer cuts it off at the end of the line."""
        commands = [(name, self.get_command(ctx, name)) for name in self.list_commands(ctx)]
        with formatter.section("Commands"):
            formatter.write_dl([(name, one.get_short_help_str(_SENTENCE)) for name, one in commands if one is not None])


def _advise(error: Any) -> None:
    """Add to the message of `error`, for an unknown option or an extra word, how the command's settings are written; do
    nothing if the command has none."""
    context = getattr(error, "ctx", None)
    if context is None or not isinstance(said := getattr(error, "message", None), str):
        return
    names = {parameter.name for parameter in context.command.params}
    if "overrides" in names and hasattr(error, "possibilities"):
        error.message = f"{said}; settings are written without dashes, such as trainer.steps=100"
    elif "settings" in names and said.startswith("Got unexpected extra"):
        error.message = f"{said}; each setting has --set before it"
