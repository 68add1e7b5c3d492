"""Text to token ids and back, by the tokenizer of a model folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, cast

from tokenizers import Tokenizer as Backend
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from stretto.core.errors import DataError, ModelFolderError, Problem
from stretto.model.hf.folder import eos_token_ids


@dataclass(frozen=True)
class Tokenizer:
    """A tokenizer with a fast backend.

    Example, with a character tokenizer::

        tokenizer.encode("3+8=")          # (5, 12, 10, 14)
        tokenizer.decode((3, 3, 1))       # "11": special tokens are left out
        tokenizer.eos_token_ids           # (1,)
    """

    place: str
    eos_token_ids: tuple[int, ...]
    _whole: PreTrainedTokenizerFast
    _backend: Backend

    def encode(self, text: str, *, special_tokens: bool = True) -> tuple[int, ...]:
        """The token ids of `text`.

        Args:
            special_tokens: add those of the tokenizer's own template (such as a beginning-of-sequence token); False for
                text that continues a sequence, such as a completion.

        Raises:
            DataError: the text holds characters that the tokenizer does not know.
        """
        try:
            ids = self._backend.encode(text, add_special_tokens=special_tokens).ids
        except Exception as error:  # the backend raises nothing narrower
            raise self._unknown(text, str(error)) from None
        if self._whole.unk_token_id is not None and self._whole.unk_token_id in ids:
            raise self._unknown(text, f"it becomes {self._whole.unk_token}")
        return tuple(ids)

    @property
    def has_chat_template(self) -> bool:
        return bool(self._whole.chat_template)

    @property
    def chat_template(self) -> str:
        """Its text, that for tools where the folder has several; empty if there is none."""
        found = self._whole.chat_template or ""
        return found if isinstance(found, str) else "\n".join(found.values())

    def encode_chat(self, messages: Sequence[Mapping[str, str]], **arguments: Any) -> tuple[int, ...]:
        """The token ids of a conversation by the folder's chat template, up to the start of the completion.
        The template gets the `arguments`.

        Raises:
            ModelFolderError: the tokenizer has no chat template.
            DataError: the template refuses the messages.
        """
        # without special tokens: the template has added them already
        return self.encode(self.render_chat(messages, opening=True, **arguments), special_tokens=False)

    def render_chat(self, messages: Sequence[Mapping[str, Any]], *, opening: bool, **arguments: Any) -> str:
        """The text of a conversation; `opening` adds how the next completion begins. The template gets the `arguments`.

        Raises:
            ModelFolderError: the tokenizer has no chat template.
            DataError: the template refuses the messages.
        """
        if not self.has_chat_template:
            remedy = "give prompts as plain text, or choose a model whose tokenizer has a chat template"
            raise ModelFolderError([Problem(self.place, "the tokenizer has no chat template", remedy)])
        try:
            turns = [dict(message) for message in messages]
            text = self._whole.apply_chat_template(turns, tokenize=False, add_generation_prompt=opening, **arguments)
        except Exception as error:  # templates are programs of the model's author and raise any exception
            raise DataError([Problem("messages", f"refused by the chat template: {error}")]) from None
        return cast(str, text)

    @property
    def vocabulary(self) -> dict[str, int]:
        """Every token with its id."""
        return self._backend.get_vocab()

    @cached_property
    def special_token_ids(self) -> frozenset[int]:
        """The special tokens, which `decode` leaves out."""
        return frozenset(at for at, token in self._backend.get_added_tokens_decoder().items() if token.special)

    def serialized(self) -> str:
        """The whole tokenizer as the JSON text of the package `tokenizers`, without padding and truncation."""
        backend = Backend.from_str(self._backend.to_str())
        backend.no_padding()
        backend.no_truncation()
        return backend.to_str()

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`, without special tokens."""
        return self._backend.decode(ids, skip_special_tokens=True)

    def spell(self, ids: Sequence[int]) -> str:
        """The text of `ids`, special tokens too."""
        return self._backend.decode(ids, skip_special_tokens=False)

    def name(self, token_id: int) -> str:
        """The text of one token by itself, special ones too."""
        return self.spell((token_id,))

    def _unknown(self, text: str, why: str) -> DataError:
        known = self._backend.get_vocab()
        strange = sorted({character for character in text if character not in known})
        shown = text if len(text) <= 60 else text[:57] + "..."
        found = f"{shown!r} cannot be encoded ({why})"
        return DataError([Problem(self.place, found, f"not in the vocabulary: {' '.join(map(repr, strange))}")])


def load_tokenizer(folder: Path | str) -> Tokenizer:
    """The tokenizer of a model folder.

    Raises:
        ModelFolderError: the folder has none, or one without a fast backend.
    """
    place = str(folder)
    if not Path(folder).is_dir():
        raise ModelFolderError([Problem(place, "no such folder", "a Hugging Face model folder is needed")])
    try:
        whole = AutoTokenizer.from_pretrained(place, local_files_only=True)
    except Exception as error:  # broken files make transformers raise any exception, and the folder is to blame
        problem = Problem(place, f"the tokenizer cannot be loaded: {error}", "save a fast tokenizer there")
        raise ModelFolderError([problem]) from error
    if not isinstance(whole, PreTrainedTokenizerFast):
        found = f"the tokenizer is a {type(whole).__name__}, which has no fast backend"
        raise ModelFolderError([Problem(place, found, "a folder with tokenizer.json is needed")])
    return Tokenizer(place, eos_token_ids(Path(folder)), whole, whole.backend_tokenizer)
