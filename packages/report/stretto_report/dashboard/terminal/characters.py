"""Safe output to terminals: ASCII fallback, and texts without markup and control characters."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import IO

from rich.console import Console
from rich.highlighter import ReprHighlighter
from rich.text import Text

from stretto.core.errors import harmless

_NAMES = ("LC_ALL", "LC_CTYPE", "LANG")  # the first variable that is set determines the character set
_ASCII = frozenset({"C", "POSIX"})
_HIGHLIGHT = ReprHighlighter()
_COERCED = "C.UTF-8"  # Python's value of LC_CTYPE if the user has set LANG to C


class AsciiConsole(Console):
    """Console for a terminal that shows only ASCII: rich draws its frames with ASCII characters."""

    @property
    def encoding(self) -> str:
        return "ascii"


def open_console(file: IO[str] | None = None) -> Console:
    """Make a console of `file`; None: of standard output. It is an `AsciiConsole` if the output's encoding is not UTF-8
    or the locale is C."""
    console = Console(file=file)
    if console.encoding.startswith("utf") and not is_ascii_locale(os.environ):
        return console
    return AsciiConsole(file=file)


def is_ascii_locale(environment: Mapping[str, str]) -> bool:
    """Whether the environment variables (``LC_ALL`` before ``LC_CTYPE`` before ``LANG``) select the locale C. False if
    they select none: then the encoding of the output decides. ``C.UTF-8`` beside LANG C is skipped: Python sets it.

    >>> is_ascii_locale({"LANG": "C"}), is_ascii_locale({"LANG": "C", "LC_ALL": "en_US.UTF-8"}), is_ascii_locale({})
    (True, False, False)
    """
    given = [value for name in _NAMES if (value := environment.get(name))]
    if given and given[0] == _COERCED and environment.get("LANG") in _ASCII:
        given = given[1:]
    return bool(given) and given[0] in _ASCII


def is_ascii(console: Console) -> bool:
    """Whether a console can print only ASCII: its encoding is not UTF-8."""
    return not console.encoding.startswith("utf")


def words(text: str, style: str = "") -> Text:
    """Return a text of any origin for the terminal: markup is shown as it is, and control characters are escaped
    (`harmless`)."""
    return Text(harmless(text), style=style)


def cell(content: str | Text) -> Text:
    """Return the content of a table's cell: `words` of a text with numbers highlighted as by rich; a `Text` as it
    is."""
    return content if isinstance(content, Text) else _HIGHLIGHT(words(content))
