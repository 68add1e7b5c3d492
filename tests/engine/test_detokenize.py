"""Promises: joined, the pieces are the text of all tokens, however the tokens were grouped; no piece ends in the middle
of a character; with what is pending, they are the text so far.
"""

import functools
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from stretto.core.columns import pack, view_of_ids
from stretto.engine.text import NO_CHARACTER, RunningText
from stretto.model.hf.tokenizer import Tokenizer, load_tokenizer
from tests.engine.byte_policy import VOCABULARY
from tests.engine.decoders import KINDS, Decoder


@pytest.fixture(scope="module")
def tokenizer(byte_folder: Path) -> Tokenizer:
    return load_tokenizer(byte_folder)


@given(groups=st.lists(st.lists(st.integers(0, VOCABULARY - 1), max_size=30), max_size=8))
def test_pieces_join_to_the_text_of_all_tokens(tokenizer: Tokenizer, groups: list[list[int]]) -> None:
    pieces = RunningText(tokenizer)
    text = "".join(pieces.push(group) for group in groups) + pieces.end()
    assert text == tokenizer.decode([token for group in groups for token in group])


@given(text=st.text(max_size=40))
def test_characters_come_whole_and_as_soon_as_they_are(tokenizer: Tokenizer, text: str) -> None:
    pieces, tokens = RunningText(tokenizer), tokenizer.encode(text, special_tokens=False)
    told = ""
    for count, token in enumerate(tokens, 1):
        told += pieces.push([token])
        now = tokenizer.decode(tokens[:count])
        assert told == now or (now.endswith("\ufffd") and text.startswith(told))
    assert told + pieces.end() == text


def test_bytes_that_no_token_can_mend_are_not_held_for_ever(tokenizer: Tokenizer) -> None:
    broken, pieces = tokenizer.vocabulary["ÿ"], RunningText(tokenizer)  # the byte 0xFF, which is in no character
    told = "".join(pieces.push([broken]) for _ in range(40))
    assert told == "\ufffd" * len(told)
    assert len(told) >= 20
    rest = [pieces.push([token]) for token in tokenizer.encode("€", special_tokens=False)]
    assert told + "".join(rest) == "\ufffd" * 40 + "€"


def test_a_first_space_is_treated_as_the_decoder_treats_it() -> None:
    """A decoder of the sentencepiece kind drops the space before the first word, and only there."""
    words = {word: at for at, word in enumerate(["▁the", "▁cat", "▁sat", "s", "<unk>"])}
    backend = Backend(models.WordLevel(words, unk_token="<unk>"))
    backend.decoder = decoders.Metaspace()

    backend.add_special_tokens([AddedToken("</s>", special=True)])
    pieces = RunningText(Decoder(backend, "</s>"))
    assert [pieces.push([token]) for token in (0, 1, 3, 2)] == ["the", " cat", "s", " sat"]


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
def test_other_decoders_keep_the_promise_wherever_the_text_is_one(kind: str, data: st.DataObject) -> None:
    """A decoder with byte fallback takes back characters when bytes that are none follow; then nobody can know."""
    decoder, names = KINDS[kind]
    token = st.sampled_from([*decoder.special_token_ids, *range(len(names))])
    groups = data.draw(st.lists(st.lists(token, max_size=6), max_size=12))
    text, pieces = decoder.decode([token for group in groups for token in group]), RunningText(decoder)
    told = "".join(pieces.push(group) for group in groups) + pieces.end()
    assert told == text or (kind == "byte fallback" and NO_CHARACTER in text)


@given(tokens=st.lists(st.integers(0, VOCABULARY - 1), max_size=120))
def test_with_what_is_pending_the_pieces_are_the_text_so_far(tokenizer: Tokenizer, tokens: list[int]) -> None:
    pieces, told = RunningText(tokenizer), ""
    for count, token in enumerate(tokens, 1):
        told += pieces.push([token])
        assert told + pieces.pending == tokenizer.decode(tokens[:count])
        assert set(pieces.pending) <= {NO_CHARACTER}


@pytest.mark.parametrize("kept", [frozenset(), frozenset({"<think>"})], ids=["none kept", "one kept"])
@pytest.mark.parametrize("kind", ["byte level", "byte fallback", "fused"])
@given(ids=st.lists(st.integers(0, 300) | st.integers(256, 280), max_size=30))
def test_packed_ids_have_the_text_of_their_numbers(kind: str, kept: frozenset[str], ids: list[int]) -> None:
    """Also ids beyond the vocabulary, which a padded model may sample, and tokens that are no bytes of the decoder."""
    tokenizer = packed_reader(kind, kept)
    for many in (ids, ids * 20):  # from 64 on their bytes are gathered
        assert tokenizer.decode(view_of_ids(pack(many, ()), len(many))) == tokenizer.decode(many)


@functools.cache
def packed_reader(kind: str, kept: frozenset[str]) -> Tokenizer:
    backend = Backend.from_str(KINDS.get(kind, KINDS["byte level"])[0]._backend.to_str())
    if kind == "fused":
        backend.decoder = decoders.Fuse()
    backend.add_special_tokens([AddedToken("<think>", special=True)])
    backend.add_tokens([AddedToken("a b"), AddedToken("ĠĊ€")])
    return Tokenizer("here", (), PreTrainedTokenizerFast(tokenizer_object=backend), backend, kept=kept)
