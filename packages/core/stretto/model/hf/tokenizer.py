"""Text to token ids and back, by the tokenizer of a model folder. Text in a chat message stays text in the template's
output, even if it spells a special token.

    contents ─► guarded ─► template ─► rendered ─┬─ special tokens in it are the template's own
                                                 └─ unguarded: the readable text

Guarding replaces one character by a mark of three characters wherever a content spells a special token, or could spell
one together with its neighbours. Replacing whole contents by placeholders would not work, because templates inspect
contents, strip them, split them at ``</think>`` and write them as JSON.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer as Backend
from tokenizers import decoders
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from stretto.core.errors import DataError, ModelFolderError, Problem
from stretto.model.hf.inspection import check_is_model_folder, eos_token_ids

_MARK = "\U0010fffd"  # last character of the last private-use plane; if a content contains it, it is marked too
_PLANE = 0xF0000
_MARKED = re.compile(f"{_MARK}([\U000f0000-\U000f0010])([\U000f0000-\U000fffff])")
_DIVIDED = re.compile(r"</?think>")  # templates split contents at these tags
_REPLY = "the reply"  # a message that no template changes
_OF_THE_TEMPLATE = frozenset({"role", "type"})  # keys whose values templates only compare


class TextGuard:
    """Rewrites texts so that no special token is spelled in them; `unguarded` undoes it. `specials`: the tokens' texts.

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
        """Guard a text, so that `encode_rendered` reads no special token in it: replace, by a mark that can be undone,
        the first character of each special token, and characters of each beginning of one at the text's end and of each
        end of one at its start."""
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
        """Guard all strings in nested lists and mappings, including keys; returns a copy. Other values stay, and so do
        values of the keys "role" and "type" that contain no special token."""
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
    """Return the mark of three characters for one character; `_read` undoes it."""
    high, low = divmod(ord(character), 1 << 16)
    return _MARK + chr(_PLANE + high) + chr(_PLANE + low)


def _read(mark: re.Match[str]) -> str:
    high, low = (ord(part) - _PLANE for part in mark.groups())
    return chr((high << 16) + low)


_JOINING = (decoders.ByteLevel, decoders.Fuse)  # they treat the first token of a text like any other
_MANY = 64  # tokens from which on packed ids are gathered: below, the calls of NumPy take longer than the backend
#: The byte that each character of a token of a `decoders.ByteLevel` stands for (GPT-2's encoder, turned round).
_PRINTED = [*range(33, 127), *range(161, 173), *range(174, 256)]
_REST = [byte for byte in range(256) if byte not in _PRINTED]
_BYTES = {byte: byte for byte in _PRINTED} | {256 + at: byte for at, byte in enumerate(_REST)}
_ALPHABET = frozenset(map(chr, _BYTES))


def _bytes_of(token: str) -> bytes:
    """The bytes that a token of a byte-level tokenizer stands for; UTF-8 if a character is outside its alphabet."""
    return token.translate(_BYTES).encode("latin-1") if _ALPHABET.issuperset(token) else token.encode()


class _Spelled:
    """Decodes many token ids at once, from one array with the bytes of all tokens. `tokens`: bytes of each token, by
    id; ids beyond have no text."""

    def __init__(self, tokens: Sequence[bytes]) -> None:
        self._sizes = np.array([*map(len, tokens), 0])
        self._starts = self._sizes.cumsum() - self._sizes
        self._bytes = np.frombuffer(b"".join(tokens) or b"\0", np.uint8)

    def text(self, ids: NDArray[np.int32]) -> str:
        """The text of these tokens; what is no character reads as U+FFFD."""
        if not len(ids):
            return ""
        known = np.minimum(ids.view(np.uint32), len(self._sizes) - 1)
        sizes = self._sizes[known]
        ends = sizes.cumsum()
        places = np.arange(ends[-1]) + np.repeat(self._starts[known] - ends + sizes, sizes)
        found: bytes = self._bytes[places].tobytes()
        return found.decode(errors="replace")


@dataclass(frozen=True)
class Tokenizer:
    """The tokenizer of a model folder, which must have a fast backend.

    Example, with a character tokenizer::

        tokenizer.encode("3+8=")          # (5, 12, 10, 14)
        tokenizer.decode((3, 3, 1))       # "11": special tokens are left out
        tokenizer.eos_token_ids           # (1,)

    Made by `load_tokenizer`. Special tokens spelled in chat messages are encoded as text, unless
    `special_tokens_in_messages`. `kept`: texts of special tokens that `decode` keeps, such as thinking tags; without
    the tags a thought would read as an answer. `place`: the folder, for messages.
    """

    place: str
    eos_token_ids: tuple[int, ...]
    _whole: PreTrainedTokenizerFast
    _backend: Backend
    special_tokens_in_messages: bool = False
    kept: frozenset[str] = frozenset()

    def encode(self, text: str, *, special_tokens: bool = True) -> tuple[int, ...]:
        """Return the token ids of `text`; special tokens spelled in it become special tokens.

        Args:
            special_tokens: add the special tokens of the tokenizer's own template, such as a beginning-of-sequence
                token; False for text that continues a sequence, such as a completion.

        Raises:
            DataError: the text has characters that the tokenizer does not know.
        """
        try:
            found = self._backend.encode(text, add_special_tokens=special_tokens)
        except Exception as error:  # the backend raises no narrower type
            raise self._unknown(text, str(error)) from None
        ids, unknown = found.ids, self._whole.unk_token_id
        if unknown is not None and unknown in ids:
            parts = (text[start:end] for id, (start, end) in zip(ids, found.offsets, strict=True) if id == unknown)
            if not self._unknown_ends or not all(part == "" or self._whole.unk_token in part for part in parts):
                raise self._unknown(text, f"it becomes {self._whole.unk_token}")
        return tuple(ids)

    @cached_property
    def _unknown_ends(self) -> bool:
        """Whether the unknown token also begins, ends or pads texts, as in GPT-2: then it is no mistake where a text
        spells it, or where the tokenizer adds it."""
        whole = self._whole
        return whole.unk_token_id in (whole.bos_token_id, whole.eos_token_id, whole.pad_token_id)

    @property
    def has_chat_template(self) -> bool:
        return bool(self._whole.chat_template)

    @property
    def chat_template(self) -> str:
        """Text of the chat template, or the texts of all templates joined by line breaks; "" if there is none."""
        found = self._whole.chat_template or ""
        return found if isinstance(found, str) else "\n".join(found.values())

    def encode_chat(self, messages: Sequence[Mapping[str, str]], **arguments: Any) -> tuple[int, ...]:
        """Return the token ids of a conversation in the folder's chat template, up to the start of the completion.
        `arguments`: further variables for the template.

        Raises:
            ModelFolderError: the tokenizer has no chat template.
            DataError: the template refuses the messages, or they have characters that the tokenizer does not know.
        """
        return self.encode_rendered(self.render_chat(messages, opening=True, **arguments))

    def encode_rendered(self, text: str) -> tuple[int, ...]:
        """Return the token ids of a result of `render_chat`, or of a part of one. Only special tokens that the template
        has written are encoded as special tokens. In message contents they are encoded as text, unless
        `special_tokens_in_messages`. Raises DataError if the text has characters that the tokenizer does not know."""
        plain = unguarded(text)
        whole = self.encode(plain, special_tokens=False)  # the template has already added special tokens
        if plain == text:
            return whole
        own = self._controls(text)
        if [(len(unguarded(text[:start])), token) for start, _, token in own] == [
            (start, token) for start, _, token in self._controls(plain)
        ]:
            return whole  # no guarded text contains a special token
        found, at = list[int](), 0
        for start, end, token in own:
            found += (*self._as_text(unguarded(text[at:start])), token)
            at = end
        return (*found, *self._as_text(unguarded(text[at:])))

    def read_rendered(self, text: str) -> str:
        """Return the readable text of a result of `render_chat`, without marks."""
        return unguarded(text)

    def encode_content(self, text: str) -> tuple[int, ...]:
        """Return the token ids of a message's content that continues a sequence. Special tokens in it are encoded as
        text, unless `special_tokens_in_messages`. Raises DataError if the text has characters that the tokenizer does
        not know."""
        found = self.encode(text, special_tokens=False)
        return found if self.special_tokens_in_messages or not self._controls(text) else tuple(self._as_text(text))

    def _controls(self, text: str) -> list[tuple[int, int, int]]:
        """List the special tokens in a text, each as (start, end, token id); `end` is exclusive."""
        whole, known = self._backend.encode(text, add_special_tokens=False), self._specials
        return [
            (start, end, token)
            for token, (start, end) in zip(whole.ids, whole.offsets, strict=True)
            if known.get(token, "\0") in text[start:end]  # unknown characters map to a special token, too
        ]

    def _as_text(self, text: str) -> Sequence[int]:
        """Return the token ids of a text, with special tokens encoded as text; empty for "". Raises DataError for
        characters that the tokenizer does not know."""
        if not text:
            return ()
        found: Sequence[int] = self._blind.encode(text, add_special_tokens=False).ids
        if self._specials.keys().isdisjoint(found):
            return found
        # Some tokenizers have special tokens among their ordinary pieces; single characters are never special tokens.
        parts = [self._blind.encode(one, add_special_tokens=False).ids for one in text]
        if unknown := [one for one, ids in zip(text, parts, strict=True) if not self._specials.keys().isdisjoint(ids)]:
            raise self._unknown("".join(unknown), "it becomes a special token")
        return list(chain.from_iterable(parts))

    @cached_property
    def _blind(self) -> Backend:
        """A backend that treats special tokens as text."""
        backend = Backend.from_str(self.serialized())
        backend.encode_special_tokens = True
        return backend

    @cached_property
    def _specials(self) -> dict[int, str]:
        added = self._backend.get_added_tokens_decoder()
        return {at: token.content for at, token in added.items() if token.special}

    @cached_property
    def _guard(self) -> TextGuard:
        return TextGuard(self._specials.values())

    def render_chat(self, messages: Sequence[Mapping[str, Any]], *, opening: bool, **arguments: Any) -> str:
        """Render a conversation in the chat template. The result is guarded text (`TextGuard`):
        `encode_rendered` gives its tokens, `read_rendered` its readable text. `opening`: add the start of the next
        completion. `arguments`: further variables for the template.

        Raises:
            ModelFolderError: the tokenizer has no chat template.
            DataError: the template refuses the messages.
        """
        if not self.has_chat_template:
            remedy = "give prompts as plain text, or choose a model whose tokenizer has a chat template"
            raise ModelFolderError([Problem(self.place, "the tokenizer has no chat template", remedy)])
        try:
            turns = [dict(message) for message in messages]
            if not self.special_tokens_in_messages:
                turns = self._guard.tree(turns)
                arguments |= {name: self._guard.tree(arguments[name]) for name in ("tools",) if name in arguments}
            text = self._whole.apply_chat_template(turns, tokenize=False, add_generation_prompt=opening, **arguments)
        except Exception as error:  # templates are programs of the model's author and may raise anything
            raise DataError([Problem("messages", f"refused by the chat template: {error}")]) from None
        return cast(str, text)

    @cached_property
    def end_of_turn(self) -> tuple[int, ...]:
        """The end-of-sequence token that the chat template writes behind an assistant's message; if it writes none, the
        first of `eos_token_ids`. Llama 3 and Gemma 3, for example, end a turn by another token than a text."""
        ends, behind = self.eos_token_ids, ""
        if self.has_chat_template and len(ends) > 1:
            messages = [{"role": "user", "content": "1"}, {"role": "assistant", "content": _REPLY}]
            with suppress(DataError):  # the template refuses them
                behind = self.read_rendered(self.render_chat(messages, opening=False)).partition(_REPLY)[2]
        texts = {end: self.spell((end,)) for end in ends}
        found = [(behind.find(text), -len(text), end) for end, text in texts.items() if text and text in behind]
        return (min(found)[2],) if found else ends[:1]

    @property
    def vocabulary(self) -> dict[str, int]:
        """Token ids by token, added tokens included."""
        return self._backend.get_vocab()

    @cached_property
    def special_token_ids(self) -> frozenset[int]:
        """Ids of the special tokens that `decode` leaves out."""
        return frozenset(self._specials) - self._kept

    @cached_property
    def _kept(self) -> frozenset[int]:
        return frozenset(token for token, text in self._specials.items() if text in self.kept)

    def serialized(self) -> str:
        """Return the tokenizer as JSON of the `tokenizers` package, without padding and truncation."""
        backend = Backend.from_str(self._backend.to_str())
        backend.no_padding()
        backend.no_truncation()
        return backend.to_str()

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of `ids`, without special tokens except `kept` ones. Long packed ids (a `memoryview` of
        int32) are decoded faster by most tokenizers."""
        if isinstance(ids, memoryview):
            spelled = self._spelled if len(ids) >= _MANY else None
            return self.decode(ids.tolist()) if spelled is None else spelled.text(np.asarray(ids))
        if not self._kept or self._kept.isdisjoint(ids):  # the latter looks at every id
            return self._backend.decode(ids, skip_special_tokens=True)
        return self.spell([token for token in ids if token not in self.special_token_ids])

    @cached_property
    def _spelled(self) -> _Spelled | None:
        """The bytes of every token, for `decode` (none for a token that it drops); None if the texts of tokens cannot
        simply be joined."""
        if not self._joins_texts:
            return None
        backend, dropped = self._backend, self.special_token_ids
        texts = [backend.id_to_token(token) or "" for token in range(max(self.vocabulary.values(), default=0) + 1)]
        as_bytes = _bytes_of if isinstance(backend.decoder, decoders.ByteLevel) else str.encode
        return _Spelled([b"" if token in dropped else as_bytes(text) for token, text in enumerate(texts)])

    def text_of(self, token: int) -> str | None:
        """Return the text of a single token as `decode` does, if the texts of tokens can simply be joined to the text
        of a sequence; else None. An incomplete character reads as U+FFFD."""
        if not self._joins_texts:
            return None
        if (text := self._texts.get(token)) is None:
            self._texts[token] = text = self.decode((token,))
        return text

    @cached_property
    def _joins_texts(self) -> bool:
        return isinstance(self._backend.decoder, _JOINING)

    @cached_property
    def _texts(self) -> dict[int, str]:
        return {}

    def spell(self, ids: Sequence[int]) -> str:
        """Return the text of `ids`, including special tokens."""
        return self._backend.decode(ids, skip_special_tokens=False)

    def _unknown(self, text: str, why: str) -> DataError:
        """Return the error for a text that cannot be encoded; `why`: for the message."""
        shown = text if len(text) <= 60 else text[:57] + "..."
        found = f"{shown!r} cannot be encoded ({why})"
        return DataError([Problem(self.place, found, not_in_vocabulary(self.unknown_in(text)))])

    def unknown_in(self, text: str) -> set[str]:
        """Characters of `text` that are no tokens of the vocabulary."""
        return set(text) - self._characters

    @cached_property
    def _characters(self) -> frozenset[str]:
        """The tokens of one character. They are kept because a vocabulary takes tenths of a second to read, and each
        question of a data set may have an unknown character."""
        return frozenset(token for token in self._backend.get_vocab() if len(token) == 1)


def not_in_vocabulary(characters: Iterable[str]) -> str:
    """Name characters that a tokenizer does not know, for the end of a message; "" if there are none."""
    named = " ".join(map(repr, sorted(characters)))
    return f"not in the vocabulary: {named}" if named else ""


def load_tokenizer(
    folder: Path | str, special_tokens_in_messages: bool = False, *, kept: frozenset[str] = frozenset()
) -> Tokenizer:
    """Load the tokenizer of a model folder.

    Args:
        special_tokens_in_messages: encode special tokens spelled in chat messages as special tokens, not as text.
        kept: texts of special tokens that `Tokenizer.decode` keeps.

    Raises:
        ModelFolderError: the folder has no tokenizer that can be loaded, or one without a fast backend.
    """
    place = str(folder)
    check_is_model_folder(Path(folder), place)
    try:
        whole = AutoTokenizer.from_pretrained(place, local_files_only=True)
    except Exception as error:  # broken files may make transformers raise anything; the folder is to blame
        problem = Problem(place, f"the tokenizer cannot be loaded: {error}", "save a fast tokenizer there")
        raise ModelFolderError([problem]) from error
    if not isinstance(whole, PreTrainedTokenizerFast):
        found = f"the tokenizer is a {type(whole).__name__}, which has no fast backend"
        raise ModelFolderError([Problem(place, found, "a folder with tokenizer.json is needed")])
    ends = eos_token_ids(Path(folder), whole.backend_tokenizer.token_to_id)
    return Tokenizer(place, ends, whole, whole.backend_tokenizer, special_tokens_in_messages, kept)
