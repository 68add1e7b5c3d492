"""Promises: an answer's stop text is found with the very token that completes it in the decoded text, however tokens
cut characters and whatever the decoder does with spaces; a token costs the same late as early. In a text that is given
out, a stop is found wherever it is cut, nothing of it is given out, and what only begins like one is."""

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import pre_tokenizers

from stretto.core.errors import ModelFolderError, Problem, RefusedRequest
from stretto.engine.text import Detokenizer, StopFinder, StopTexts, Watch
from tests.engine.decoders import KINDS, Decoder, byte_level


def first_by_watch(decoder: Detokenizer, tokens: Sequence[int], stops: Sequence[str]) -> int | None:
    watch = Watch(decoder, stops)
    return next((at for at, token in enumerate(tokens) if watch.completed([token])), None)


def first_by_definition(decoder: Detokenizer, tokens: Sequence[int], stops: Sequence[str]) -> int | None:
    texts = (decoder.decode(tokens[: at + 1]) for at in range(len(tokens)))
    return next((at for at, text in enumerate(texts) if any(stop in text for stop in stops)), None)


def ids(kind: str, *names: str) -> list[int]:
    decoder, all_names = KINDS[kind]
    return [next(iter(decoder.special_token_ids)) if name == "</s>" else all_names.index(name) for name in names]


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=100)
@given(data=st.data())
def test_the_stop_is_found_where_the_whole_text_has_it_first(kind: str, data: st.DataObject) -> None:
    decoder, names = KINDS[kind]
    common = [at for at, name in enumerate(names) if len(name) > 1 or name in "ab€ \n▁"]
    token = st.sampled_from([*common, *decoder.special_token_ids, *range(len(names))])
    tokens = data.draw(st.lists(token, max_size=28))
    stops = data.draw(st.lists(st.text("ab€ \n", min_size=1, max_size=5), min_size=1, max_size=3))
    assert first_by_watch(decoder, tokens, stops) == first_by_definition(decoder, tokens, stops)


@pytest.mark.parametrize(
    ("kind", "names", "stop", "place"),
    [
        ("byte fallback", ("a", "▁b", "▁a"), "a b", 1),
        ("byte fallback", ("▁", "▁b"), " b", 1),  # the text's first space is dropped, its second is not
        ("byte fallback", ("▁b", "a"), " b", None),
        ("byte fallback", ("a", "<0xE2>", "<0x82>", "<0xAC>", "b"), "a€", 3),
        ("byte fallback", ("<0x61>", "<0xE2>", "<0x82>", "<0xAC>", "b"), "a€b", 4),
        ("byte fallback", ("a", "</s>", "</s>", "b"), "ab", 3),  # special tokens are no text
        ("byte level", ("ab", "ba"), "abba", 1),
        ("byte level", ("ab", "ba"), "bb", 1),
    ],
)
def test_places_by_hand(kind: str, names: tuple[str, ...], stop: str, place: int | None) -> None:
    assert first_by_watch(KINDS[kind][0], ids(kind, *names), [stop]) == place


def test_bytes_that_never_become_a_character_do_not_pile_up() -> None:
    decoder, names = byte_level()
    broken = names.index(pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str("€")[0][0][:2])
    tokens = [*[broken] * 500, names.index("ab"), names.index("ba")]
    assert first_by_watch(decoder, tokens, ["abba"]) == 501
    assert decoder.longest < 50


def test_the_cost_of_a_token_does_not_grow_with_the_answer() -> None:
    decoder, names = byte_level()
    first_by_watch(decoder, [names.index("aa")] * 2000, ["b" * 256])
    assert decoder.longest <= 3


def test_a_new_watch_that_is_shown_the_answer_again_goes_on_where_the_old_one_was() -> None:
    decoder = KINDS["byte fallback"][0]
    tokens = ids("byte fallback", "▁a", "▁b", "<0xE2>", "<0x82>", "<0xAC>", "a")
    for cut in range(len(tokens)):
        watch = Watch(decoder, ["b€a"])
        assert not watch.completed(tokens[:cut])
        assert watch.seen == cut
        assert watch.completed(tokens[cut:])


def test_the_detokenizer_is_made_once_and_only_when_it_is_needed() -> None:
    made: list[Decoder] = []

    def make() -> Decoder:
        made.append(byte_level()[0])
        return made[-1]

    texts = StopTexts(make)
    assert not made
    texts.check_served()
    texts.check_served()
    texts.watch(["a"])
    assert len(made) == 1


def test_without_a_tokenizer_stop_texts_are_refused_by_name() -> None:
    def broken() -> Decoder:
        raise ModelFolderError([Problem("here", "no tokenizer.json")])

    for texts, why in ((StopTexts(None), "this engine has no tokenizer"), (StopTexts(broken), "no tokenizer.json")):
        with pytest.raises(RefusedRequest, match=rf"sampling.stop: .*{why}"):
            texts.check_served()


def cut(sequence: str, places: list[int]) -> list[str]:
    bounds = [0, *sorted(place % (len(sequence) + 1) for place in places), len(sequence)]
    return [sequence[a:b] for a, b in itertools.pairwise(bounds)]


TEXTS = st.text("ab<", max_size=30)


@given(
    text=TEXTS, stops=st.lists(st.text("ab<", min_size=1, max_size=4), max_size=3), places=st.lists(st.integers(0, 30))
)
def test_a_stop_is_found_however_the_text_is_cut(text: str, stops: list[str], places: list[int]) -> None:
    ends = [(text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text]
    finder = StopFinder(stops)
    told = "".join(finder.push(piece) for piece in cut(text, places))
    assert bool(finder.found) == bool(ends)
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
