"""Stop texts: an answer ends with the token that completes one of them.

What counts is the text of the answer (`engine.native.detokenize`), so a stop text may begin and end in the middle of
tokens. The engine asks a `Watch` after each token; a server gives text out through a `StopFinder`, which keeps what may
be the beginning of a stop text until it is known to be none::

    text        ... "ca" | "f" | "é" | " <" | "/s>" ...
    StopFinder      "ca"   "f"   "é"   " "    found      "<" may begin the stop text "</s>": it waits
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

from stretto.core.errors import ModelFolderError, RefusedRequest
from stretto.engine.native.detokenize import Detokenizer, RunningText


class StopFinder:
    """Cuts a text off where the first stop text begins.

    The first is the one that is complete first; of those that end at the same place, the longest. Neither depends on
    how the text was cut into pieces.

    >>> finder = StopFinder(("</s>", "\\n\\n"))
    >>> finder.push("a <"), finder.push("b> <"), finder.push("/s> c"), finder.found
    ('a ', '<b> ', '', True)
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [_Stop(stop) for stop in stops]
        self._held = ""
        self.found = False

    def push(self, text: str) -> str:
        """What of the text so far is certainly no part of a stop text, and was not returned before."""
        if not self._stops:
            return text
        if self.found:
            return ""
        known = len(self._held)
        self._held += text
        for end, character in enumerate(text, known + 1):
            for stop in self._stops:
                stop.read(character)
            if whole := [len(stop.text) for stop in self._stops if stop.whole]:
                self.found = True
                return self._give_out(end - max(whole))
        return self._give_out(len(self._held) - max(stop.begun for stop in self._stops))

    def end(self) -> str:
        """What was held back: no more text comes."""
        return self._give_out(len(self._held))

    def _give_out(self, ready: int) -> str:
        piece, self._held = self._held[:ready], "" if self.found else self._held[ready:]
        return piece


class _Stop:
    """How much of one stop text the text read so far ends with (Knuth, Morris, Pratt 1977)."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.begun = 0  # characters
        self._shorter = _shorter_beginnings(text)

    @property
    def whole(self) -> bool:
        return self.begun == len(self.text)

    def read(self, character: str) -> None:
        self.begun = _longer(self.begun, self.text, self._shorter, character)


def _longer(begun: int, stop: str, shorter: Sequence[int], character: str) -> int:
    """Characters of `stop` that a text ends with, of which it ended with `begun` before its last character."""
    while begun and stop[begun] != character:
        begun = shorter[begun - 1]
    return begun + (stop[begun] == character)


@lru_cache(maxsize=1024)
def _shorter_beginnings(stop: str) -> tuple[int, ...]:
    """For each beginning of `stop`, the length of the longest shorter one that it ends with."""
    lengths = [0]
    for character in stop[1:]:
        lengths.append(_longer(lengths[-1], stop, lengths, character))
    return tuple(lengths)


class Watch:
    """Follows one answer, token by token.

    `seen` counts the tokens that it was shown; it can be rebuilt by showing a new one the answer from its start.
    """

    def __init__(self, detokenizer: Detokenizer, stops: Sequence[str]) -> None:
        self.seen = 0
        self._text, self._stop = RunningText(detokenizer), StopFinder(stops)

    def completed(self, tokens: Sequence[int]) -> bool:
        """Whether the next tokens of the answer complete a stop text; the answer ends with the first that does."""
        self.seen += len(tokens)
        return any(self._completed_by(token) for token in tokens)

    def _completed_by(self, token: int) -> bool:
        self._stop.push(self._text.push((token,)))  # what is pending are U+FFFD, which no stop text holds
        return self._stop.found


class StopTexts:
    """Makes watches. The detokenizer is made when the first request with stop texts comes, and then kept."""

    def __init__(self, detokenizer: Callable[[], Detokenizer] | None) -> None:
        self._make = detokenizer
        self._made: Detokenizer | None = None

    def check_served(self) -> None:
        """Make sure that stop texts can be watched for.

        Raises:
            RefusedRequest: there is no tokenizer.
        """
        if self._made is not None:
            return
        if self._make is None:
            raise RefusedRequest("sampling.stop", "stop texts", "none: this engine has no tokenizer")
        try:
            self._made = self._make()
        except ModelFolderError as error:
            raise RefusedRequest("sampling.stop", "stop texts", f"none: there is no tokenizer ({error})") from None

    def watch(self, stops: Sequence[str]) -> Watch:
        """Follow a new answer. `check_served` has passed."""
        assert self._made is not None, "checked when the request was added"
        return Watch(self._made, stops)
