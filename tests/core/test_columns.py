"""Sealed tokens say what their numbers say, wherever they are cut, joined and sent; a flipped bit is noticed."""

import math
import struct

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.core.columns import pack
from stretto.core.records import Segment

IDS = st.integers(0, 2**31 - 1)
#: Log-probabilities as engines record them (float32), and as others send them.
LOGPROBS = st.floats(max_value=0, width=32, allow_nan=False) | st.floats(max_value=0, allow_nan=False)
TOKENS = st.lists(st.tuples(IDS, LOGPROBS, st.integers(0, 3)), max_size=12)
Rows = list[tuple[int, float, int]]


def sealed(rows: Rows) -> Segment:
    rows = [(token, logprob, at) for (token, logprob, _), at in zip(rows, sorted(row[2] for row in rows), strict=True)]
    return Segment.of([row[0] for row in rows], [row[1] for row in rows], [row[2] for row in rows])


def said(segment: Segment) -> Rows:
    return list(zip(segment.token_ids, segment.behavior_logprobs, segment.versions, strict=True))


@given(TOKENS)
def test_sealed_tokens_say_what_their_numbers_say(rows: Rows) -> None:
    segment, versions = sealed(rows), sorted(row[2] for row in rows)
    assert segment.intact
    assert said(segment) == [(token, logprob, at) for (token, logprob, _), at in zip(rows, versions, strict=True)]
    assert (segment.length, segment.sampled) == (len(rows), bool(rows))
    across = msgspec.msgpack.decode(msgspec.msgpack.encode(segment), type=Segment)
    assert (across, across.intact) == (segment, True)


@given(st.lists(IDS, max_size=12))
def test_given_tokens_have_neither_log_probabilities_nor_versions(token_ids: list[int]) -> None:
    segment = Segment.of(token_ids)
    assert (segment.token_ids, segment.behavior_logprobs, segment.versions) == (tuple(token_ids), (), ())
    assert segment.intact
    assert not segment.sampled


@given(TOKENS, st.integers(0, 14))
def test_a_segment_that_is_cut_and_joined_is_itself(rows: Rows, cut: int) -> None:
    whole = sealed(rows)
    before, behind = sealed(said(whole)[:cut]), whole.after(cut)
    assert behind.intact
    assert said(behind) == said(whole)[cut:]
    assert said(before + behind) == said(whole)
    assert (before + behind).intact
    assert whole.begins_with(before)
    if cut < len(rows):
        assert not whole.begins_with(Segment.of([*list(before.token_ids), whole.token_ids[cut] ^ 1]))


@given(TOKENS.filter(len), st.data())
def test_a_flipped_bit_is_noticed(rows: Rows, data: st.DataObject) -> None:
    segment = sealed(rows)
    at = data.draw(st.integers(0, 8 * len(segment.columns) - 1))
    columns = bytearray(segment.columns)
    columns[at // 8] ^= 1 << at % 8
    assert not msgspec.structs.replace(segment, columns=bytes(columns)).intact
    assert not msgspec.structs.replace(segment, checksum=segment.checksum ^ 1).intact
    first, *others = segment.stamps
    assert not msgspec.structs.replace(segment, stamps=((first[0] + 1, first[1]), *others)).intact
    assert not msgspec.structs.replace(segment, length=segment.length - 1).intact


@pytest.mark.parametrize(
    "wrong",
    [
        Segment.sealed(pack((4, 4), ()), 2, ((0, 2),)),
        Segment.sealed(pack((4, 4), (-0.5, -0.5)), 2, ()),
        Segment.sealed(pack((4, 4), (-0.5, -0.5)), 2, ((0, 1),)),
        Segment.sealed(pack((4, 4), (-0.5, -0.5)), 2, ((0, 3), (1, -1))),
        Segment.sealed(pack((4, 4), (-0.5, -0.5))[:-1], 2, ((0, 2),)),
        Segment.sealed(b"", 0, ((5, 0),)),
    ],
)
def test_a_checksum_does_not_make_columns_whole(wrong: Segment) -> None:
    assert not wrong.intact


def test_a_log_probability_of_float32_takes_half_the_room() -> None:
    (single,) = struct.unpack("f", struct.pack("f", -0.1))
    assert len(Segment.of((4,), (single,), (0,)).columns) == 8
    assert len(Segment.of((4,), (-0.1,), (0,)).columns) == 12
    for strange in (-math.inf, math.nan):
        (back,) = Segment.of((4,), (strange,), (0,)).behavior_logprobs
        assert back == strange or math.isnan(back)


def test_numbers_that_do_not_fit_each_other_are_refused() -> None:
    with pytest.raises(ValueError, match="2 tokens have 1 log-probabilities and 2 versions"):
        Segment.of((4, 5), (-0.5,), (0, 0))
    with pytest.raises(OverflowError):
        Segment.of((2**31,))
