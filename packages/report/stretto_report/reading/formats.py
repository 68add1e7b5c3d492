"""File formats for records: JSON lines, CSV for spreadsheets, and parquet, whose schema follows from the record's type
annotations.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any, BinaryIO

import msgspec
from msgspec import inspect

from stretto.core.errors import Problem, StoreError, UserError

#: First characters, in ASCII or full width, by which a spreadsheet recognises a formula.
_FORMULA = ("=", "+", "-", "@", "\uff1d", "\uff0b", "\uff0d", "\uff20", "\t", "\r", "\n")
_MARK = "'"
_NUL, _SHOWN_NUL = "\x00", "\u2400"


class _JsonLines:
    """Writes records to an open file as JSON lines (UTF-8); NaN becomes null. `kind` is not used."""

    def __init__(self, file: BinaryIO, kind: type[msgspec.Struct]) -> None:
        self._file, self._encode = file, msgspec.json.Encoder().encode

    def write(self, row: msgspec.Struct) -> None:
        self._file.write(self._encode(row) + b"\n")

    def close(self) -> None:
        """Do nothing, since every row is written already. The file stays open."""


class _Csv:
    """Writes records of the type `kind` to an open file as CSV (RFC 4180, UTF-8). The header is written at once.

    Texts are quoted, null is an unquoted empty cell, nested values are JSON text. No cell is taken for a formula: see
    `cell`.
    """

    def __init__(self, file: BinaryIO, kind: type[msgspec.Struct]) -> None:
        self._file, self._names = file, kind.__struct_fields__
        self._line(",".join(self._names))

    def write(self, row: msgspec.Struct) -> None:
        self._line(",".join(cell(getattr(row, name)) for name in self._names))

    def close(self) -> None:
        """Do nothing, since every row is written already. The file stays open."""

    def _line(self, line: str) -> None:
        self._file.write(f"{line}\n".encode())


def cell(value: object) -> str:
    """Format a value as a cell of CSV; None and NaN become an empty cell.
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


_PACKAGE = "pyarrow"
_GROUP_BYTES = 8 << 20  # encoded size at which a row group is written; in memory it takes a few times as much
_COMPRESSION = "zstd"


class _Parquet:
    """Writes records of the type `kind` to an open parquet file; needs pyarrow (``stretto[data]``)."""

    def __init__(self, file: BinaryIO, kind: type[msgspec.Struct]) -> None:
        """Begin the file; the fields of `kind` give its columns. Raises UserError if pyarrow is missing."""
        try:
            self._arrow = importlib.import_module(_PACKAGE)
            writer = importlib.import_module(f"{_PACKAGE}.parquet").ParquetWriter
        except ImportError as error:
            found = f"needs the package {_PACKAGE!r}, which cannot be imported ({error})"
            raise UserError([Problem("--format parquet", found, "pip install 'stretto[data]'")]) from None
        self._schema = self._arrow.schema(_struct(self._arrow, kind))
        self._writer = writer(file, self._schema, compression=_COMPRESSION)
        self._measure = msgspec.msgpack.Encoder().encode
        self._rows: list[dict[str, Any]] = []
        self._bytes = 0

    def write(self, row: msgspec.Struct) -> None:
        """Add a row. Rows are written in groups of about 8 MiB. Raises StoreError if a number in the group that is
        written has more than 64 bits."""
        self._rows.append(_plain(row))
        self._bytes += len(self._measure(row))
        if self._bytes >= _GROUP_BYTES:
            self._write_group()

    def close(self) -> None:
        """Write the last row group and the footer, without which the file is invalid. Raises StoreError as `write`
        does; the footer is written all the same."""
        try:
            if self._rows:
                self._write_group()
        finally:
            self._writer.close()

    def _write_group(self) -> None:
        rows, self._rows, self._bytes = self._rows, [], 0
        try:
            table = self._arrow.Table.from_pylist(rows, schema=self._schema)
        except (self._arrow.ArrowException, OverflowError) as error:
            raise StoreError(f"a number on record has no place in parquet: {error}") from error
        self._writer.write_table(table)


def _plain(value: Any) -> Any:
    """Convert a value for Arrow: a record becomes a dict, a mapping a list of ``{"name": ..., "value": ...}``, and a
    tuple (but of numbers) a list of its converted items. Other values are returned as they are."""
    if isinstance(value, msgspec.Struct):
        return {name: _plain(getattr(value, name)) for name in value.__struct_fields__}
    if isinstance(value, dict):
        return [{"name": name, "value": one} for name, one in value.items()]
    if isinstance(value, tuple) and value and not isinstance(value[0], int | float):
        return [_plain(one) for one in value]
    return value


def _struct(arrow: Any, kind: type[msgspec.Struct]) -> list[tuple[str, Any]]:
    found = inspect.type_info(kind)
    assert isinstance(found, inspect.StructType)
    return [(field.name, _type(arrow, field.type)) for field in found.fields]


def _type(arrow: Any, kind: inspect.Type) -> Any:
    match kind:
        case inspect.BoolType():
            return arrow.bool_()
        case inspect.IntType():
            return arrow.int64()
        case inspect.FloatType():
            return arrow.float64()
        case inspect.StrType():
            return arrow.string()
        case inspect.UnionType(types=types):  # with null, which every column may be
            (one,) = [one for one in types if not isinstance(one, inspect.NoneType)]
            return _type(arrow, one)
        case inspect.VarTupleType(item_type=item):
            return arrow.list_(_type(arrow, item))
        case inspect.TupleType(item_types=(item, *_)):
            return arrow.list_(_type(arrow, item))
        case inspect.StructType(cls=cls):
            return arrow.struct(_struct(arrow, cls))
        case inspect.DictType(value_type=value):
            return arrow.list_(arrow.struct([("name", arrow.string()), ("value", _type(arrow, value))]))
    raise TypeError(f"no column can hold {kind}")


#: Writers by the name of the format, which is also its file suffix; each takes an open file and the record type.
FORMATS: Mapping[str, Callable[[BinaryIO, type[msgspec.Struct]], _JsonLines | _Parquet | _Csv]] = {
    "jsonl": _JsonLines,
    "parquet": _Parquet,
    "csv": _Csv,
}
