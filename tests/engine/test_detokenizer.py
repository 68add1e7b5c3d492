"""Promises: joined, the pieces are the text of all tokens, however the tokens were grouped; no piece ends in the middle
of a character; a stop text is found wherever it is cut, nothing of it is given out, and what only begins like one is.
"""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

from stretto.engine.detokenizer import Detokenizer, StopFinder
from stretto.model.tokenizer import Tokenizer, load_tokenizer
from tests.engine.openai_serving import VOCABULARY


@pytest.fixture(scope="module")
def tokenizer(byte_folder: Path) -> Tokenizer:
    return load_tokenizer(byte_folder)


def cut(sequence: str, places: list[int]) -> list[str]:
    bounds = [0, *sorted(place % (len(sequence) + 1) for place in places), len(sequence)]
    return [sequence[a:b] for a, b in itertools.pairwise(bounds)]


@given(groups=st.lists(st.lists(st.integers(0, VOCABULARY - 1), max_size=30), max_size=8))
def test_pieces_join_to_the_text_of_all_tokens(tokenizer: Tokenizer, groups: list[list[int]]) -> None:
    pieces = Detokenizer(tokenizer.decode)
    text = "".join(pieces.push(group) for group in groups) + pieces.end()
    assert text == tokenizer.decode([token for group in groups for token in group])


@given(text=st.text(max_size=40))
def test_characters_come_whole_and_as_soon_as_they_are(tokenizer: Tokenizer, text: str) -> None:
    pieces, tokens = Detokenizer(tokenizer.decode), tokenizer.encode(text, special_tokens=False)
    told = ""
    for count, token in enumerate(tokens, 1):
        told += pieces.push([token])
        now = tokenizer.decode(tokens[:count])
        assert told == now or (now.endswith("\ufffd") and text.startswith(told))
    assert told + pieces.end() == text


def test_bytes_that_no_token_can_mend_are_not_held_for_ever(tokenizer: Tokenizer) -> None:
    (begins, *_), broken = tokenizer.encode("€", special_tokens=False), token_of(tokenizer, 0xFF)
    pieces = Detokenizer(tokenizer.decode)
    told = "".join(pieces.push([broken]) for _ in range(40))
    assert told == "\ufffd" * len(told)
    assert len(told) >= 20
    rest = [pieces.push([token]) for token in tokenizer.encode("€", special_tokens=False)]
    assert told + "".join(rest) == "\ufffd" * 40 + "€"
    assert begins != broken


def token_of(tokenizer: Tokenizer, byte: int) -> int:
    """The token of a byte that is no character: what all lone bytes look like, but never completes anything."""
    latin = [t for t in range(3, VOCABULARY) if tokenizer.decode([t]) == "\ufffd"]
    leads = {
        tokenizer.encode(chr(c), special_tokens=False)[0] for c in range(128, 0x110000, 64) if not 0xD800 <= c < 0xE000
    }
    followers = {t for c in range(128, 192) for t in tokenizer.encode(chr(c), special_tokens=False)}
    assert byte == 0xFF
    return next(t for t in latin if t not in leads | followers)


def test_a_first_space_is_treated_as_the_decoder_treats_it() -> None:
    """A decoder of the sentencepiece kind drops the space before the first word, and only there."""
    words = {word: at for at, word in enumerate(["▁the", "▁cat", "▁sat", "s", "<unk>"])}
    backend = Backend(models.WordLevel(words, unk_token="<unk>"))
    backend.decoder = decoders.Metaspace()

    def decode(ids: list[int] | tuple[int, ...]) -> str:
        return backend.decode(list(ids), skip_special_tokens=True)

    pieces = Detokenizer(lambda ids: decode(tuple(ids)))
    assert [pieces.push([token]) for token in (0, 1, 3, 2)] == ["the", " cat", "s", " sat"]


TEXTS = st.text("ab<", max_size=30)


@given(
    text=TEXTS, stops=st.lists(st.text("ab<", min_size=1, max_size=4), max_size=3), places=st.lists(st.integers(0, 30))
)
def test_a_stop_is_found_however_the_text_is_cut(text: str, stops: list[str], places: list[int]) -> None:
    ends = [(text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text]
    finder = StopFinder(stops)
    told = "".join(finder.push(piece) for piece in cut(text, places))
    assert finder.found == bool(ends)
    assert told + finder.end() == (text[: min(ends)[1]] if ends else text)


@given(text=TEXTS, stop=st.text("ab<", min_size=1, max_size=4))
def test_no_more_is_held_back_than_may_begin_a_stop(text: str, stop: str) -> None:
    finder, told = StopFinder([stop]), ""
    for at, character in enumerate(text, 1):
        told += finder.push(character)
        if finder.found:
            return
        held = text[len(told) : at]
        assert stop.startswith(held)
        assert len(held) < len(stop)


def test_text_after_a_stop_is_no_text_of_the_answer() -> None:
    finder = StopFinder(["ab", "b"])
    assert (finder.push("xa"), finder.push("bz"), finder.push("more"), finder.end()) == ("x", "", "", "")
