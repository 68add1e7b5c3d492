"""Stop texts: an answer ends with the token that completes one of them.

What counts is the text that `decode` makes of the answer, so a stop text may begin and end in the middle of tokens.
Tokens are not text one by one: a character may be spread over several, and a decoder may treat the first token of a
text in a way of its own (it drops the space that the token begins with). So a new token is decoded together with a few
before it, and what these alone decode to is taken off::

    tokens           ... | settled: their text is final | undecided | newest
    decoded          -----------------------------------                       base
    decoded          ---------------------------------------------------------- whole = base + fresh text

The base moves on when the text ends with a whole character. Of the text before, only as much is kept as could be the
beginning of a stop text, so a token costs the same however long the answer is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from stretto.core.errors import ModelFolderError, RefusedRequest

#: What decoders write for bytes that are no character, or not yet one. No stop text holds it.
NO_CHARACTER = "\ufffd"

#: Undecided tokens after which bytes are taken for what they are: no text. A character has four bytes at most.
_MOST_UNDECIDED = 32
_OVERLAP = 8


class Detokenizer(Protocol):
    """Token ids to text (implemented by `stretto.model.tokenizer.Tokenizer`)."""

    @property
    def special_token_ids(self) -> frozenset[int]:
        """Tokens that `decode` leaves out."""
        ...

    def decode(self, ids: Sequence[int], /) -> str: ...


class Watch:
    """Follows one answer, token by token.

    `seen` counts the tokens that it was shown; it can be rebuilt by showing a new one the answer from its start.
    """

    def __init__(self, detokenizer: Detokenizer, stops: Sequence[str]) -> None:
        self.seen = 0
        self._detokenizer = detokenizer
        self._stops = stops
        self._keep = max(len(stop) for stop in stops) - 1
        self._before = ""  # the last characters of the settled text
        self._tokens: list[int] = []  # some settled ones, then the undecided ones
        self._settled = 0  # of these tokens
        self._base = 0  # characters that the settled ones decode to

    def completed(self, tokens: Sequence[int]) -> bool:
        """Whether the next tokens of the answer complete a stop text; the answer ends with the first that does."""
        self.seen += len(tokens)
        special = self._detokenizer.special_token_ids
        return any(token not in special and self._completed_by(token) for token in tokens)

    def _completed_by(self, token: int) -> bool:
        self._tokens.append(token)
        fresh = self._detokenizer.decode(self._tokens)[self._base :]
        text = self._before + fresh
        if fresh and not fresh.endswith(NO_CHARACTER):
            self._settle(text, self._settled)
        elif len(self._tokens) - self._settled > _MOST_UNDECIDED:
            self._settle(text.rstrip(NO_CHARACTER), len(self._tokens) - _OVERLAP)
        return any(stop in text for stop in self._stops)

    def _settle(self, text: str, first: int) -> None:
        """The text is final; go on with the tokens from `first` on as the base."""
        self._before = text[max(0, len(text) - self._keep) :]
        del self._tokens[:first]
        self._settled = len(self._tokens)
        self._base = len(self._detokenizer.decode(self._tokens).rstrip(NO_CHARACTER))


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
