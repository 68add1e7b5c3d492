"""Lossless JSON for arguments and results of calls: tuples differ from lists, keys may be numbers.

This file is sent to guests too (see `guest`), so it imports little and nothing of this package.
"""

from __future__ import annotations

import _json

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

TUPLE, SET, DICT, BYTES = "\0tuple", "\0set", "\0dict", "\0bytes"


def plain(value: object) -> Any:
    """`value` as JSON that distinguishes tuples, lists, sets, and keys of any type.

    Raises:
        TypeError: it contains anything but numbers, texts, bytes, None and these containers.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list):
        return [plain(item) for item in value]
    if isinstance(value, tuple):
        return {TUPLE: [plain(item) for item in value]}
    if isinstance(value, set | frozenset):
        return {SET: sorted((plain(item) for item in value), key=encoded)}
    if isinstance(value, dict):
        if all(isinstance(key, str) and not key.startswith("\0") for key in value):
            return {key: plain(item) for key, item in value.items()}
        return {DICT: sorted(([plain(key), plain(item)] for key, item in value.items()), key=encoded)}
    if isinstance(value, bytes):
        return {BYTES: value.hex()}
    raise TypeError(f"a {type(value).__name__} is no result that a test can expect")


def encoded(value: Any) -> str:
    """JSON text of a value in the form of `plain`, as the json module writes it (NaN and Infinity included), which is
    slow to import."""
    if isinstance(value, str):
        return _json.encode_basestring_ascii(str(value))
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, int):
        return int.__repr__(value)
    if isinstance(value, float):
        return {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}.get(float.__repr__(value), float.__repr__(value))
    if isinstance(value, list):
        return f"[{', '.join(map(encoded, value))}]"
    return "{" + ", ".join(f"{encoded(key)}: {encoded(item)}" for key, item in value.items()) + "}"


def lively(value: Any) -> Any:
    """Convert a value in the form of `plain` back to Python objects."""
    if isinstance(value, list):
        return [lively(item) for item in value]
    if not isinstance(value, dict):
        return value
    match list(value.items()):
        case [(key, items)] if key == TUPLE:
            return tuple(map(lively, items))
        case [(key, items)] if key == SET:
            return set(map(lively, items))
        case [(key, items)] if key == DICT:
            return {lively(name): lively(item) for name, item in items}
        case [(key, digits)] if key == BYTES:
            return bytes.fromhex(digits)
    return {key: lively(item) for key, item in value.items()}
