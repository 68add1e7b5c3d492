"""Promises of the frames: what goes in comes out, however the stream is chopped; an absurd length is refused."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.core import frames
from stretto.core.errors import WireError
from stretto.core.frames import LARGEST_BATCH, Unframer, frame


@given(messages=st.lists(st.lists(st.integers(0, 255), max_size=40), max_size=6), cut=st.integers(1, 9))
def test_messages_survive_any_chopping(messages: list[list[int]], cut: int) -> None:
    stream = b"".join(frame(message) for message in messages)
    unframer = Unframer()
    bodies = [body for at in range(0, len(stream), cut) for body in unframer.feed(stream[at : at + cut])]
    assert [msgspec.msgpack.decode(body) for body in bodies] == messages


def test_an_order_of_the_run_may_be_larger_than_what_others_send() -> None:
    """Its header is read; the body would come."""
    header = (1_400_000_000).to_bytes(4, "little")
    assert Unframer(LARGEST_BATCH).feed(header) == []
    with pytest.raises(WireError, match="1,400,000,000 bytes"):
        Unframer().feed(header)


def test_a_message_longer_than_a_frame_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames, "LARGEST_BATCH", 99)
    assert len(frame(b"x" * 97)) == 99 + 4
    with pytest.raises(WireError, match="a message of 100 bytes; at most 99 are allowed"):
        frame(b"x" * 98)


def test_a_length_that_no_message_has_is_refused() -> None:
    with pytest.raises(WireError, match="4,294,967,295 bytes"):
        Unframer().feed(b"\xff\xff\xff\xff")
