"""Streaming text of a completion: whole characters only, cut off at the first stop text.

A character may be spread over several tokens, and a decoder may treat the first token of a text differently (it drops
its leading space). So new tokens are decoded together with a few before them, whose text is then cut off::

    tokens     ... | base: already sent      | newer ones
    decoded        --------------------------              sent
    decoded        --------------------------------------- sent + new text + pending

Bytes at the end that are no complete character are pending. When there are none, the newer tokens become the base, so
the cost of a token does not grow with the completion. Where the decoder gives a token the same text everywhere, nothing
is decoded twice.

Stop texts are searched in the text, so they may begin and end inside tokens. A server sends text through a
`StopFinder`, which holds back a possible beginning of a stop text::

    text        ... "ca" | "f" | "é" | " <" | "/s>" ...
    StopFinder      "ca"   "f"   "é"   " "    found      "<" may begin the stop text "</s>": it waits
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

#: Replacement character that decoders write for incomplete or invalid bytes.
NO_CHARACTER = "\ufffd"

_LONGEST_CHARACTER = 4  # bytes of UTF-8
_MOST_UNDECIDED = 32  # tokens after which bytes are taken for what they are: no text
_OVERLAP = 16  # tokens of the base then: more bytes than what may still be mended, and what stands before it, can have


class Detokenizer(Protocol):
    """Decodes token ids (implemented by `stretto.model.hf.tokenizer.Tokenizer`)."""

    @property
    def special_token_ids(self) -> frozenset[int]:
        """Tokens that `decode` leaves out."""
        ...

    def decode(self, ids: Sequence[int], /) -> str: ...

    def text_of(self, token: int, /) -> str | None:
        """Text of a token by itself, if the decoder joins such texts, or their bytes, as they are; else None."""
        ...


class RunningText:
    """The text of one completion in pieces that never end inside a character; joined, they are the text of its tokens.

    Example, with a tokenizer of bytes::

        text = RunningText(tokenizer)
        text.push([0x63]), text.push([0xC3]), text.push([0xA9]), text.end()    # "c", "", "é", ""
    """

    def __init__(self, detokenizer: Detokenizer) -> None:
        self._detokenizer = detokenizer
        self._tokens: list[int] = []  # the base, then newer ones
        self._base = 0  # of these tokens
        self._sent = 0  # characters of their text
        self.pending = ""  #: decoded text that later tokens may still change

    def push(self, token_ids: Sequence[int]) -> str:
        """Append tokens; returns the characters that they complete."""
        if len(token_ids) == 1 and not self.pending:
            alone = self._detokenizer.text_of(token_ids[0])
            if alone is not None and NO_CHARACTER not in alone:
                self._tokens, self._base, self._sent = [*token_ids], 1, len(alone)
                return alone
        special = self._detokenizer.special_token_ids
        self._tokens += [token for token in token_ids if token not in special]
        fresh = self._detokenizer.decode(self._tokens)[self._sent :]
        text = fresh.rstrip(NO_CHARACTER)
        self.pending = fresh[len(text) :]
        if fresh and not self.pending:
            self._rebase(self._base)
        elif len(self._tokens) - self._base > _MOST_UNDECIDED:
            self.pending = self.pending[: _LONGEST_CHARACTER - 1]
            text = fresh[: len(fresh) - len(self.pending)]
            self._rebase(len(self._tokens) - _OVERLAP)
        else:
            self._sent += len(text)
        return text

    def end(self) -> str:
        """Pending text, once no more tokens come."""
        rest, self.pending = self.pending, ""
        return rest

    def _rebase(self, first: int) -> None:
        """Keep only the tokens from `first` on, enough to decode the next ones."""
        del self._tokens[:first]
        self._base = len(self._tokens)
        self._sent = len(self._detokenizer.decode(self._tokens)) - len(self.pending)


class StopFinder:
    """Cuts a text off at the first stop text.

    The first is the one that is completed first; among those that end at the same position, the longest. The result
    does not depend on how the text is cut into pieces.

    >>> finder = StopFinder(("</s>", "\\n\\n"))
    >>> finder.push("a <"), finder.push("b> <"), finder.push("/s> c"), finder.found
    ('a ', '<b> ', '', '</s>')
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._held = ""
        self.found = ""  #: the stop text that was found

    @property
    def looks(self) -> bool:
        """Whether there is a stop text to find."""
        return bool(self._stops)

    def push(self, text: str) -> str:
        """Append text; returns the text that is certainly not part of a stop text."""
        if not self._stops:
            return text
        if self.found:
            return ""
        self._held += text
        ends = [(at + len(stop), -len(stop), stop) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if ends:
            end, size, self.found = min(ends)
            return self._give_out(end + size)
        return self._give_out(len(self._held) - max(_overlap(self._held, stop) for stop in self._stops))

    def end(self) -> str:
        """Text held back, once no more comes."""
        return self._give_out(len(self._held))

    def _give_out(self, ready: int) -> str:
        piece, self._held = self._held[:ready], "" if self.found else self._held[ready:]
        return piece


def _overlap(text: str, stop: str) -> int:
    """Number of characters at the end of a text that may begin a stop text."""
    longest = min(len(text), len(stop) - 1)
    return next((length for length in range(longest, 0, -1) if text.endswith(stop[:length])), 0)
