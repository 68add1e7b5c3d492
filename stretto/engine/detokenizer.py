"""Text out of tokens while they come: never half a character, never the beginning of a stop text.

tokens      ... "ca" | "f" | 0xC3 | 0xA9 | " <" | "/s>" ...
Detokenizer     "ca"   "f"   ""     "é"    " <"   "/s>"      whole characters
StopFinder      "ca"   "f"   ""     "é"    " "    stop       "<" may begin the stop text "</s>": it waits
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

Decode = Callable[[Sequence[int]], str]

_BROKEN = "\ufffd"  # what a decoder writes for bytes that are no character (yet)
_LONGEST_CHARACTER = 4  # bytes of UTF-8, and so the tokens of one at most
_MOST_HELD = 16  # tokens that may stay undecided before those that no token can mend any more are given out
_LONGEST_WINDOW = 32


class Detokenizer:
    """The text of an answer in pieces; joined, they are the text of all its tokens.

    Only the newest tokens are decoded again with each push: a *window* that begins with the tokens of the last piece,
    because some decoders treat a first token differently from the same token further on.

    Example, with a tokenizer of bytes::

        pieces = Detokenizer(tokenizer.decode)
        pieces.push([0x63]), pieces.push([0xC3]), pieces.push([0xA9]), pieces.end()    # "c", "", "é", ""
    """

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._window: list[int] = []
        self._read = 0  # tokens of the window whose text was given out

    def push(self, token_ids: Sequence[int]) -> str:
        """The characters that these tokens complete."""
        self._window += token_ids
        text = self._decode(self._window)
        if not text.endswith(_BROKEN):
            return self._give_out(text, len(self._window))
        if len(self._window) - self._read <= _MOST_HELD:
            return ""
        return self._give_out(*self._head(text))

    def end(self) -> str:
        """What was held back: no more tokens come."""
        return self._give_out(self._decode(self._window), len(self._window))

    def _head(self, text: str) -> tuple[str, int]:
        """The text of the window but for its last tokens if they may begin a character, and the tokens it has."""
        for held in range(_LONGEST_CHARACTER - 1, 0, -1):
            cut = len(self._window) - held
            head = self._decode(self._window[:cut])
            if head + self._decode(self._window[cut:]) == text:
                return head, cut
        return text, len(self._window)

    def _give_out(self, text: str, tokens: int) -> str:
        piece = text[len(self._decode(self._window[: self._read])) :]
        if piece or tokens > _LONGEST_WINDOW:
            del self._window[: self._read]
            self._read = tokens - self._read
        else:  # special tokens have no text: those before them stay the beginning of the window
            self._read = tokens
        return piece


class StopFinder:
    """Cuts a text off where the first stop text begins.

    The first is the one that is complete first; of those that end at the same place, the longest. Neither depends on
    how the text was cut into pieces.

    >>> finder = StopFinder(("</s>", "\\n\\n"))
    >>> finder.push("a <"), finder.push("b> <"), finder.push("/s> c"), finder.found
    ('a ', '<b> ', '', True)
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.found = False

    def push(self, text: str) -> str:
        """What of the text so far is certainly no part of a stop text, and was not returned before."""
        if not self._stops:
            return text
        if self.found:
            return ""
        self._held += text
        places = [(at + len(stop), at) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        self.found = bool(places)
        ready = min(places)[1] if places else len(self._held) - self._beginning()
        piece, self._held = self._held[:ready], "" if places else self._held[ready:]
        return piece

    def end(self) -> str:
        """What was held back: no more text comes."""
        rest, self._held = self._held, ""
        return rest

    def _beginning(self) -> int:
        """The length of the longest beginning of a stop text that the text ends with."""
        longest = 0
        for stop in self._stops:
            for length in range(min(len(stop) - 1, len(self._held)), longest, -1):
                if self._held.endswith(stop[:length]):
                    longest = length
                    break
        return longest
