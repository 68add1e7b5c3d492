"""What a terminal can print, and what it must not be sent."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import IO

from rich.console import Console

_NAMES = ("LC_ALL", "LC_CTYPE", "LANG")  # the first one that is set says the locale of characters
_ASCII = frozenset({"C", "POSIX"})
_COERCED = "C.UTF-8"  # what Python sets LC_CTYPE to where the user has set LANG to C


class AsciiConsole(Console):
    """A console of a terminal that prints ASCII alone."""

    @property
    def encoding(self) -> str:
        return "ascii"


def open_console(file: IO[str] | None = None) -> Console:
    """The console of the standard output, or of `file`: of ASCII where the locale has no more."""
    console = Console(file=file)
    if console.encoding.startswith("utf") and not is_ascii_locale(os.environ):
        return console
    return AsciiConsole(file=file)


def is_ascii_locale(environment: Mapping[str, str]) -> bool:
    """Whether the user has asked for the locale C. Who has asked for none has what the encoding of the output says.

    >>> is_ascii_locale({"LANG": "C"}), is_ascii_locale({"LANG": "C", "LC_ALL": "en_US.UTF-8"}), is_ascii_locale({})
    (True, False, False)
    """
    given = [value for name in _NAMES if (value := environment.get(name))]
    if given and given[0] == _COERCED and environment.get("LANG") in _ASCII:
        given = given[1:]
    return bool(given) and given[0] in _ASCII


def is_ascii(console: Console) -> bool:
    """Whether a console prints ASCII alone."""
    return not console.encoding.startswith("utf")


def harmless(text: str, ascii_only: bool = False) -> str:
    """A text in which everything is seen and nothing steers the terminal: control characters, marks of direction and
    half characters as escapes; with `ascii_only` all others too. Ends of lines stay.

    >>> print(harmless("a\\x1b[2Jb\\u202ec"), harmless("→", ascii_only=True))
    a\\x1b[2Jb\\u202ec \\u2192
    """
    if text.isprintable() and (text.isascii() or not ascii_only):
        return text
    return "".join(
        one
        if one == "\n" or (one.isprintable() and (one.isascii() or not ascii_only))
        else one.encode("unicode_escape").decode()
        for one in text
    )
