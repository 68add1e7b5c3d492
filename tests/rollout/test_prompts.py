"""The order of asking.

- Each epoch asks every prompt once, in an order of its own that the seed decides.
- What is given back comes first, under its next name; a stream that goes on from a position asks what the other would.
"""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.rollout.prompts import Draw, Position, PromptStream
from tests.store.make import prompts

PROMPTS = prompts(5)


def names(draws: list[Draw]) -> list[str]:
    return [draw.group_id for draw in draws]


def test_each_epoch_asks_every_prompt_once_in_another_order() -> None:
    stream = PromptStream(PROMPTS, seed=1)
    epochs = [[stream.take() for _ in PROMPTS] for _ in range(3)]
    for number, draws in enumerate(epochs):
        assert sorted(draw.prompt.id for draw in draws) == ["0", "1", "2", "3", "4"]
        assert {draw.epoch for draw in draws} == {number}
    assert len({tuple(draw.prompt.id for draw in draws) for draws in epochs}) == 3


def test_the_seed_decides_the_order() -> None:
    one, same, other = (PromptStream(PROMPTS, seed) for seed in (1, 1, 2))
    orders = [[stream.take().prompt.id for _ in range(10)] for stream in (one, same, other)]
    assert orders[0] == orders[1] != orders[2]


def test_what_is_given_back_comes_first_under_its_next_name() -> None:
    stream = PromptStream(PROMPTS, seed=1)
    first, second = stream.take(), stream.take()
    stream.give_back(second)
    stream.give_back(first)
    assert names([stream.take(), stream.take()]) == [f"0.{second.prompt.id}.1", f"0.{first.prompt.id}.1"]
    assert stream.take().prompt.id not in {first.prompt.id, second.prompt.id}


def test_a_stream_without_prompts_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one prompt"):
        PromptStream([], seed=1)


@given(moves=st.lists(st.booleans(), max_size=30))
def test_a_stream_goes_on_from_a_position_as_the_other_would(moves: list[bool]) -> None:
    stream = PromptStream(PROMPTS, seed=3)
    taken: list[Draw] = []
    for give_back in moves:
        if give_back and taken:
            stream.give_back(taken.pop())
        else:
            taken.append(stream.take())
    resumed = PromptStream(PROMPTS, seed=3, position=stream.position())
    assert names([resumed.take() for _ in range(12)]) == names([stream.take() for _ in range(12)])


def test_a_position_at_the_start_is_no_position() -> None:
    assert PromptStream(PROMPTS, seed=1).position() == Position()
