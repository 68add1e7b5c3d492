"""Guard chat messages against injected special tokens: text in a message stays text in the template's output.

    contents ─► guarded ─► template ─► rendered ─┬─ special tokens in it are the template's own
                                                 └─ unguarded: the readable text

Guarding replaces one character by a mark of three characters wherever a content spells a special token, or could spell
one together with its neighbours. Replacing whole contents by placeholders would not work, because templates inspect
contents, strip them, split them at ``</think>`` and write them as JSON.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

_MARK = "\U0010fffd"  # last character of the last private-use plane; if a content contains it, it is marked too
_PLANE = 0xF0000
_MARKED = re.compile(f"{_MARK}([\U000f0000-\U000f0010])([\U000f0000-\U000fffff])")
_DIVIDED = re.compile(r"</?think>")  # templates split contents at these tags
_OF_THE_TEMPLATE = frozenset({"role", "type"})  # keys whose values templates only compare


class TextGuard:
    """Guards texts against being tokenized as special tokens. `specials`: texts of the special tokens.

    Example::

        guard = TextGuard(["<|im_end|>"])
        unguarded(guard.text("say <|im_end|>"))    # "say <|im_end|>", which the guarded text does not contain
    """

    def __init__(self, specials: Iterable[str]) -> None:
        known = sorted({special for special in specials if special}, key=len, reverse=True)
        self._whole = re.compile("(?=" + "|".join(map(re.escape, [*known, _MARK])) + ")")
        self._beginnings = {special[:size] for special in known for size in range(1, len(special))}
        self._ends = {special[size:] for special in known for size in range(1, len(special))}
        self._longest = max(map(len, known), default=0)

    def text(self, text: str) -> str:
        """Guard a text: mark each special token that it contains, each beginning of a special token at its end, and
        each end of a special token at its start."""
        places = {found.start() for found in self._whole.finditer(text)}
        edges = [0, *chain.from_iterable(found.span() for found in _DIVIDED.finditer(text)), len(text)]
        for start, end in zip(edges[::2], edges[1::2], strict=True):
            places.update(self._beyond(text, start, end))
        for place in sorted(places, reverse=True):
            text = text[:place] + _marked(text[place]) + text[place + 1 :]
        return text

    def _beyond(self, text: str, start: int, end: int) -> Iterable[int]:
        """Yield the positions, in ``text[start:end]``, of beginnings of special tokens at its end and of ends of
        special tokens at its start, with and without surrounding whitespace, which templates may strip."""
        piece = text[start:end]
        first, last = start + len(piece) - len(piece.lstrip()), start + len(piece.rstrip())
        for size in range(1, min(self._longest, len(piece) + 1)):
            for stop in {end, last}:
                if text[max(start, stop - size) : stop] in self._beginnings:
                    yield max(start, stop - size)
            for begin in {start, first}:
                if text[begin : min(end, begin + size)] in self._ends:
                    yield begin

    def tree(self, value: Any) -> Any:
        """Guard all strings in nested lists and mappings, including keys; returns a copy."""
        match value:
            case str():
                return self.text(value)
            case Mapping():
                return {
                    self.tree(key): child if key in _OF_THE_TEMPLATE and self._harmless(child) else self.tree(child)
                    for key, child in value.items()
                }
            case Sequence() if not isinstance(value, bytes):
                return [self.tree(child) for child in value]
            case _:
                return value

    def _harmless(self, value: object) -> bool:
        return isinstance(value, str) and self._whole.search(value) is None


def unguarded(text: str) -> str:
    """Undo guarding: replace all marks in `text` by the original characters."""
    return _MARKED.sub(_read, text) if _MARK in text else text


def _marked(character: str) -> str:
    high, low = divmod(ord(character), 1 << 16)
    return _MARK + chr(_PLANE + high) + chr(_PLANE + low)


def _read(mark: re.Match[str]) -> str:
    high, low = (ord(part) - _PLANE for part in mark.groups())
    return chr((high << 16) + low)
