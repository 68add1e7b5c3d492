"""Promises: whatever bytes others send or leave on disk, decoding them gives a value or raises one of `UNREADABLE`; and
whoever catches what msgspec raises catches all of it.
"""

import ast
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from stretto.core.errors import UNREADABLE

PACKAGES = Path(__file__).parents[2] / "packages"
_ALONE = {"msgspec.MsgspecError", "msgspec.DecodeError"}


@given(st.binary(max_size=64))
@example(b'{"a": "\xff"}')
@example(b"\xa1\xff")
@example(b"[" * 100_000)
@example(b"\x91" * 100_000)
def test_any_bytes_are_a_value_or_unreadable(sent: bytes) -> None:
    for decode in (msgspec.json.decode, msgspec.msgpack.decode):
        with suppress(*UNREADABLE):
            decode(sent)


@pytest.mark.parametrize("sent", [b'"\xff"', b"\xa1\xff"], ids=["JSON", "MessagePack"])
def test_text_that_is_not_utf8_is_no_error_of_msgspec(sent: bytes) -> None:
    """Else `UNREADABLE` could be shorter."""
    decode = msgspec.json.decode if sent.startswith(b'"') else msgspec.msgpack.decode
    with pytest.raises(UnicodeDecodeError):
        decode(sent)


def caught(file: Path) -> Iterator[str]:
    """Errors that the except clauses of a file name, and its calls of `suppress` and `isinstance`."""
    text = file.read_text(encoding="utf-8")
    if not any(name in text for name in _ALONE):
        return
    for node in ast.walk(ast.parse(text)):
        kinds: list[ast.expr] = []
        if isinstance(node, ast.ExceptHandler) and node.type is not None:
            kinds = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in ("suppress", "isinstance"):
            kinds = node.args
        yield from (ast.unparse(kind) for kind in kinds)


def test_no_clause_catches_a_part_of_what_decoding_raises() -> None:
    found = {str(file.relative_to(PACKAGES)) for file in PACKAGES.rglob("*.py") if _ALONE & {*caught(file)}}
    assert found == set()
