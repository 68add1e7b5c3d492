"""Tokens as pieces of text, by the tokenizer in the run's policy folder."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from stretto.core.errors import UNREADABLE, StoreError
from stretto.store.run_folder import RunFolder
from stretto_report.watch.index.files import read_text

_LARGEST = 128 << 20
_LARGEST_TEMPLATE = 4 << 20
_LONGEST_FAULT = 200
_PAUSE_SECONDS = 1.0


_TOKENIZER = "tokenizer.json"
_NUMBERS = "tokens are shown as their numbers"


class Pieces:
    """Tokenizer of a run folder, loaded on first use. Without a tokenizer, a token is shown as its id.

    `fault`: why the tokenizer in the folder cannot be used; None if it can, is not read yet, or there is none.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._tokenizer_read: Tokenizer | None = None
        self._again = float("-inf")  # time of the next attempt after a failure: the file may be half copied
        self.fault: str | None = None
        self._template: str | None = None

    @property
    def why_numbers(self) -> str | None:
        """Reason why tokens are shown as ids, in words; None if they are not. Loads the tokenizer."""
        if self._tokenizer() is not None:
            return None
        return self.fault or f"{_TOKENIZER}: no policy of the run has one; {_NUMBERS}"

    def of(self, tokens: Sequence[int]) -> list[str]:
        """Return a piece of text for each token; all pieces together are the text. A character of several tokens is in
        the piece of its last token, and the others' pieces may be empty. Without a tokenizer, and for an unknown token,
        the piece is ``⟨id⟩``."""
        tokenizer = self._tokenizer()
        if tokenizer is None:
            return [f"⟨{token}⟩" for token in tokens]
        stream, found = DecodeStream(skip_special_tokens=False), list[str]()
        for token in tokens:
            try:
                found.append(stream.step(tokenizer, token) or "")
            except Exception:  # the library raises nothing narrower for a token that it does not know
                stream = DecodeStream(skip_special_tokens=False)
                found.append(f"⟨{token}⟩")
        return found

    def text(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens: their pieces, joined."""
        return "".join(self.of(tokens))

    @property
    def chat_template(self) -> str:
        """Chat template of the policy, read at the first access; empty if there is none or it cannot be read."""
        if self._template is None:
            config = self._of_policy("tokenizer_config.json", _LARGEST_TEMPLATE)
            found: Any = None
            # A damaged file counts as one without a template.
            with contextlib.suppress(AttributeError, *UNREADABLE):
                found = msgspec.json.decode(config).get("chat_template") if config else None
            inner = self._of_policy("chat_template.jinja", _LARGEST_TEMPLATE)
            self._template = found if isinstance(found, str) else inner or ""
        return self._template

    def _tokenizer(self) -> Tokenizer | None:
        if self._tokenizer_read is None and time.monotonic() >= self._again:
            faults: list[str] = []
            if (text := self._of_policy(_TOKENIZER, _LARGEST, faults)) is not None:
                try:
                    self._tokenizer_read = Tokenizer.from_str(text)
                except Exception as error:  # as above: a damaged file
                    faults = [f"{_TOKENIZER}: cannot be read: {str(error)[:_LONGEST_FAULT]}"]
            found = self._tokenizer_read is not None or not faults
            self.fault = None if found else f"{faults[0]}; {_NUMBERS}"
            self._again = time.monotonic() + _PAUSE_SECONDS
        return self._tokenizer_read

    def _of_policy(self, name: str, largest: int, faults: list[str] | None = None) -> str | None:
        """Return the text of the file `name` in the first policy folder that has it, at most its first `largest` bytes;
        None if none has. Files that cannot be opened are skipped; their errors are appended to `faults`, if given."""
        try:
            saved = RunFolder(self._folder).saved_policies()
            kept = [path for _, path in saved if path.is_dir() and not path.is_symlink()]
        except OSError:
            return None
        for policy in kept:
            try:
                if (text := read_text(policy / name, largest)) is not None:
                    return text
            except StoreError as error:
                if faults is not None:
                    faults.append(str(error))
        return None
