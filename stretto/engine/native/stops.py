"""Stop texts: a completion ends with the token that completes one of them.

Stop texts are found in the text of the completion (`engine.native.detokenize`), so they may begin and end inside
tokens. The engine shows each token to a `Watch`; a server sends text through a `StopFinder`, which holds
back what may be the beginning of a stop text::

    text        ... "ca" | "f" | "é" | " <" | "/s>" ...
    StopFinder      "ca"   "f"   "é"   " "    found      "<" may begin the stop text "</s>": it waits
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

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
        self._stops = stops
        self._held = ""
        self.found = False

    def push(self, text: str) -> str:
        """The new text that is certainly no part of a stop text."""
        if not self._stops:
            return text
        if self.found:
            return ""
        self._held += text
        ends = [(at + len(stop), -len(stop)) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if ends:
            self.found = True
            return self._give_out(sum(min(ends)))
        return self._give_out(len(self._held) - max(_overlap(self._held, stop) for stop in self._stops))

    def end(self) -> str:
        """The text that was held back; no more comes."""
        return self._give_out(len(self._held))

    def _give_out(self, ready: int) -> str:
        piece, self._held = self._held[:ready], "" if self.found else self._held[ready:]
        return piece


def _overlap(text: str, stop: str) -> int:
    """Characters at the end of a text that may begin a stop text."""
    longest = min(len(text), len(stop) - 1)
    return next((length for length in range(longest, 0, -1) if text.endswith(stop[:length])), 0)


class Watch:
    """Looks for stop texts in one completion, token by token; `seen` counts the tokens so far."""

    def __init__(self, detokenizer: Detokenizer, stops: Sequence[str]) -> None:
        self.seen = 0
        self._text, self._stop = RunningText(detokenizer), StopFinder(stops)

    def completed(self, tokens: Sequence[int]) -> bool:
        """Whether these next tokens complete a stop text."""
        self.seen += len(tokens)
        return any(self._completed_by(token) for token in tokens)

    def _completed_by(self, token: int) -> bool:
        self._stop.push(self._text.push((token,)))  # what is pending are U+FFFD, which no stop text holds
        return self._stop.found


class StopTexts:
    """Makes watches; the detokenizer is loaded for the first request with stop texts."""

    def __init__(self, detokenizer: Callable[[], Detokenizer] | None) -> None:
        self._make = detokenizer
        self._made: Detokenizer | None = None

    def check_served(self) -> None:
        """Load the detokenizer.

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
        """A watch for a new completion; `check_served` has passed."""
        assert self._made is not None, "checked when the request was added"
        return Watch(self._made, stops)
