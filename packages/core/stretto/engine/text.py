"""Text of a completion while it is sampled: whole characters only, cut off at the first stop text; the completion ends
with the token that completes it.

A character may consist of several tokens, and a decoder may treat the first token of a text differently (it drops its
leading space). So new tokens are decoded together with a few tokens before them, whose text is then cut off::

    tokens     ... | base: already sent      | newer tokens
    decoded        --------------------------              sent
    decoded        --------------------------------------- sent + new text + pending

Bytes at the end that form no complete character are pending. When no bytes are pending, the newer tokens become the
base, so the cost of a token does not grow with the completion. If a token's text does not depend on its context,
nothing is decoded twice.

Stop texts are searched in the text, so they may begin and end inside tokens. A server sends text through a
`StopFinder`, which holds back a possible beginning of a stop text::

    text        ... "ca" | "f" | "é" | " <" | "/s>" ...
    StopFinder      "ca"   "f"   "é"   " "    found      "<" may begin the stop text "</s>": it waits

The engine passes each token to a `Watch`, which searches the decoded text of the completion.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from stretto.core.errors import ModelFolderError, RefusedRequest

#: Replacement character that decoders write for incomplete or invalid bytes.
NO_CHARACTER = "\ufffd"

_LONGEST_CHARACTER = 4  # bytes of UTF-8
_MOST_UNDECIDED = 32  # number of tokens after which incomplete bytes are given out as replacement characters
_OVERLAP = 16  # tokens of the base in that case: more than a character that is still incomplete can have


class Detokenizer(Protocol):
    """Decodes token ids (implemented by `stretto.model.hf.tokenizer.Tokenizer`)."""

    @property
    def special_token_ids(self) -> frozenset[int]:
        """Tokens that `decode` leaves out."""

    def decode(self, ids: Sequence[int], /) -> str: ...

    def text_of(self, token: int, /) -> str | None:
        """Return the text of a token if it does not depend on the tokens around it; else None."""


class RunningText:
    """Decodes one completion in pieces that never end inside a character. Joined, they are the whole text, without
    special tokens.

    Example, with a tokenizer of bytes::

        text = RunningText(tokenizer)
        text.push([0x63]), text.push([0xC3]), text.push([0xA9]), text.end()    # "c", "", "é", ""
    """

    def __init__(self, detokenizer: Detokenizer) -> None:
        self._detokenizer = detokenizer
        self._tokens: list[int] = []  # the base, then newer tokens
        self._base = 0  # number of tokens of the base
        self._sent = 0  # number of characters of the decoded text that `push` has returned
        self.pending = ""  #: decoded text that later tokens may still change

    def push(self, token_ids: Sequence[int]) -> str:
        """Append tokens; returns the new text up to the last complete character, "" if none is complete. Bytes that
        more than 32 tokens leave incomplete are returned as U+FFFD."""
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
        """Return and clear the pending text, at the end of the completion: incomplete bytes as U+FFFD, or ""."""
        rest, self.pending = self.pending, ""
        return rest

    def _rebase(self, first: int) -> None:
        """Drop the tokens before index `first`. The rest becomes the base, with which later tokens are decoded; its
        text counts as sent, except for what is pending."""
        del self._tokens[:first]
        self._base = len(self._tokens)
        self._sent = len(self._detokenizer.decode(self._tokens)) - len(self.pending)


class StopFinder:
    """Cuts a text, which comes in pieces, off at the first stop text.

    The first stop text is the one that ends first; among those that end at the same position, the longest. The result
    does not depend on how the text is divided into pieces.

    >>> finder = StopFinder(("</s>", "\\n\\n"))
    >>> finder.push("a <"), finder.push("b> <"), finder.push("/s> c"), finder.found
    ('a ', '<b> ', '', '</s>')
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._held = ""
        self.found = ""  #: the stop text that was found

    @property
    def has_stops(self) -> bool:
        """Whether there is a stop text to find."""
        return bool(self._stops)

    def push(self, text: str) -> str:
        """Append a piece of text; returns the text that is certainly before any stop text. Sets `found` at a stop text;
        later pieces give ""."""
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
        """Return the text that was held back, at the end of the completion; "" after a stop text."""
        return self._give_out(len(self._held))

    def _give_out(self, ready: int) -> str:
        piece, self._held = self._held[:ready], "" if self.found else self._held[ready:]
        return piece


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is the beginning of `stop`, but not all of it; 0 if there is none."""
    longest = min(len(text), len(stop) - 1)
    return next((length for length in range(longest, 0, -1) if text.endswith(stop[:length])), 0)


class Watch:
    """Searches for the texts `stops` in one completion, token by token. `seen`: number of tokens so far."""

    def __init__(self, detokenizer: Detokenizer, stops: Sequence[str]) -> None:
        self.seen = 0
        self._text, self._stop = RunningText(detokenizer), StopFinder(stops)

    def completed(self, tokens: Sequence[int]) -> bool:
        """Take the next tokens; True if they complete a stop text."""
        self.seen += len(tokens)
        return any(self._completed_by(token) for token in tokens)

    def _completed_by(self, token: int) -> bool:
        self._stop.push(self._text.push((token,)))  # pending bytes show as U+FFFD, which no stop text contains
        return bool(self._stop.found)


class StopTexts:
    """Creates a `Watch` for each completion of an engine that has stop texts. `detokenizer` loads the detokenizer,
    once, for the first request with stop texts; None: such requests are refused."""

    def __init__(self, detokenizer: Callable[[], Detokenizer] | None) -> None:
        self._make = detokenizer
        self._made: Detokenizer | None = None

    def check_served(self) -> None:
        """Load the detokenizer, if it is not loaded. Raises RefusedRequest if there is none, or it cannot be loaded."""
        if self._made is not None:
            return
        if self._make is None:
            raise RefusedRequest("sampling.stop", "stop texts", "none: this engine has no tokenizer")
        try:
            self._made = self._make()
        except ModelFolderError as error:
            raise RefusedRequest("sampling.stop", "stop texts", f"none: there is no tokenizer ({error})") from None

    def watch(self, stops: Sequence[str]) -> Watch:
        """A watch for the texts `stops` in a new completion; call `check_served` first."""
        assert self._made is not None, "checked when the request was added"
        return Watch(self._made, stops)
