"""Text formats for records: JSON lines, and CSV for spreadsheets."""

from __future__ import annotations

from typing import BinaryIO

import msgspec

#: First characters, in ASCII or full width, by which a spreadsheet recognises a formula.
_FORMULA = ("=", "+", "-", "@", "\uff1d", "\uff0b", "\uff0d", "\uff20", "\t", "\r", "\n")
_MARK = "'"
_NUL, _SHOWN_NUL = "\x00", "\u2400"


class JsonLines:
    """Writes records to an open file as JSON lines (UTF-8); NaN becomes null."""

    def __init__(self, file: BinaryIO, kind: type[msgspec.Struct]) -> None:
        self._file, self._encode = file, msgspec.json.Encoder().encode

    def write(self, row: msgspec.Struct) -> None:
        self._file.write(self._encode(row) + b"\n")

    def close(self) -> None:
        """Does nothing: every row is written already."""


class Csv:
    """Writes records of the type `kind` to an open file as CSV with a header (RFC 4180, UTF-8).

    Texts are quoted, null is an unquoted empty cell, nested values are JSON text. No cell is taken for a formula: see
    `cell`.
    """

    def __init__(self, file: BinaryIO, kind: type[msgspec.Struct]) -> None:
        self._file, self._names = file, kind.__struct_fields__
        self._line(",".join(self._names))

    def write(self, row: msgspec.Struct) -> None:
        self._line(",".join(cell(getattr(row, name)) for name in self._names))

    def close(self) -> None:
        """Does nothing: every row is written already."""

    def _line(self, line: str) -> None:
        self._file.write(f"{line}\n".encode())


def cell(value: object) -> str:
    """Format a value as a cell of CSV.

    A text that a spreadsheet could take for a formula, or that begins with an apostrophe, gets an apostrophe in front;
    a reader removes the first apostrophe to recover the text. NUL, at which many programs stop reading, becomes the
    character ``␀``.

    >>> cell(None), cell(0.5), cell("a"), cell('=HYPERLINK("x")'), cell((1, 2))
    ('', '0.5', '"a"', '"\\'=HYPERLINK(""x"")"', '"[1,2]"')
    """
    if value is None or value != value:
        return ""
    if isinstance(value, bool | int | float):
        return msgspec.json.encode(value).decode()
    if not isinstance(value, str):
        value = msgspec.json.encode(value).decode()
    elif value.startswith(_MARK) or value.lstrip(" ").startswith(_FORMULA):
        value = _MARK + value
    return '"' + value.replace(_NUL, _SHOWN_NUL).replace('"', '""') + '"'
