"""Stop texts: a completion ends with the token that completes a stop text.

The engine passes each token to a `Watch`, which searches the decoded text of the completion (`conversation.text`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from stretto.conversation.text import Detokenizer, RunningText, StopFinder
from stretto.core.errors import ModelFolderError, RefusedRequest


class Watch:
    """Searches for stop texts in one completion, token by token. `seen`: number of tokens so far."""

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
    """Creates watches; loads the detokenizer on the first request with stop texts."""

    def __init__(self, detokenizer: Callable[[], Detokenizer] | None) -> None:
        self._make = detokenizer
        self._made: Detokenizer | None = None

    def check_served(self) -> None:
        """Load the detokenizer, if it is not loaded.

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
        """A watch for a new completion; call `check_served` first."""
        assert self._made is not None, "checked when the request was added"
        return Watch(self._made, stops)
