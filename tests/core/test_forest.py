"""A forest keeps every token once and finds where a prompt stands; each sampled token is trained in exactly one path,
behind exactly the tokens that it was sampled behind."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from stretto.core.forest import Path, paths
from stretto.core.records import NOTHING, PROMPT, Segment, StopReason
from stretto_workflows.session import Attachment, Forest


def sampled(*tokens: int, parent: int | None = None) -> Segment:
    return Segment.of(tokens, (-0.5,) * len(tokens), (0,) * len(tokens), stop_reason=StopReason.STOP, parent=parent)


def told(*tokens: int, parent: int | None = None) -> Segment:
    return Segment.of(tokens, parent=parent)


def test_a_linear_trajectory_is_one_path_of_all_segments() -> None:
    assert paths([sampled(1, 2), told(3), sampled(4)]) == [Path(True, (0, 1, 2), (0, 2))]


@given(st.lists(st.booleans(), max_size=5))
def test_a_chain_that_names_its_parents_has_the_paths_of_one_that_does_not(kinds: list[bool]) -> None:
    bare = [sampled(at) if kind else told(at) for at, kind in enumerate(kinds)]
    named = [sampled(at, parent=at - 1) if kind else told(at, parent=at - 1) for at, kind in enumerate(kinds)]
    assert paths(named) == paths(bare)


def test_what_two_paths_share_is_in_both_and_trained_in_the_first() -> None:
    turns = [told(1), sampled(2), told(3), sampled(4), told(5, parent=1), sampled(6)]
    assert paths(turns) == [Path(True, (0, 1, 2, 3), (1, 3)), Path(True, (0, 1, 4, 5), (5,))]


def test_given_tokens_at_the_end_and_leaves_that_sampled_nothing_make_no_sample() -> None:
    assert paths([sampled(1), told(2)]) == [Path(True, (0,), (0,))]
    assert paths([sampled(1), told(2), told(3, parent=0)]) == [Path(True, (0,), (0,))]
    assert paths([told(1)]) == []


def test_a_prompt_stands_behind_the_deepest_segment_it_begins_with() -> None:
    forest = Forest((9, 9))
    first = forest.append(told(1, parent=PROMPT))
    second = forest.append(sampled(2, 3, parent=first))
    assert forest.find((9, 9)) == Attachment(PROMPT, ())
    assert forest.find((9, 9, 1, 2, 3, 7)) == Attachment(second, (7,))
    assert forest.find((9, 9, 1, 2, 4)) == Attachment(first, (2, 4))
    assert forest.find((9, 8)) == Attachment(NOTHING, (9, 8))
    assert forest.tokens(second) == (9, 9, 1, 2, 3)


def test_nothing_stands_behind_tokens_that_are_still_being_sampled() -> None:
    forest = Forest((9,))
    forest.append(Segment.of((2,), (-0.5,), (0,), parent=PROMPT))
    assert forest.find((9, 2, 5)) == Attachment(PROMPT, (2, 5))


@given(
    st.lists(st.tuples(st.lists(st.integers(0, 2), max_size=4), st.lists(st.integers(0, 2), min_size=1, max_size=3)))
)
def test_any_calls_make_a_forest_that_trains_each_sampled_token_once_behind_its_own_prompt(
    calls: list[tuple[list[int], list[int]]],
) -> None:
    forest, asked = Forest((0, 1)), dict[int, tuple[int, ...]]()
    for prompt, reply in calls:
        place = forest.find(tuple(prompt))
        parent = forest.append(told(*place.tail, parent=place.parent)) if place.tail else place.parent
        asked[forest.append(sampled(*reply, parent=parent))] = tuple(prompt)
    assert Counter(place for path in paths(forest.segments) for place in path.trained) == dict.fromkeys(asked, 1)
    for at, before in asked.items():
        assert forest.tokens(at) == before + forest.segments[at].token_ids
    again = Forest((0, 1), forest.segments)
    assert [again.find(one) for one in asked.values()] == [forest.find(one) for one in asked.values()]
