"""The order of an epoch's prompts is a function of seed, epoch and weights.

- Without weights it is every prompt once, in the order that runs had before there were sources.
- With weights each source has its share, no prompt comes twice in an epoch, and the scarcest source is used up.
- A stream that is restored at any position goes on as the one that was never stopped, resting prompts included.
"""

import random

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from stretto.core.records import derive_seed
from stretto.rollout.prompts import Draw, Position, PromptSource, PromptStream, epoch_order, shares
from tests.store.make import prompts

SOURCES = st.lists(st.tuples(st.integers(1, 40), st.floats(0.05, 20, allow_nan=False)), min_size=1, max_size=4).map(
    lambda pairs: [PromptSource(f"s{at}", count, weight) for at, (count, weight) in enumerate(pairs)]
)


def test_without_weights_the_order_is_that_of_runs_before() -> None:
    order = list(range(7))
    random.Random(derive_seed(3, "prompts", 2)).shuffle(order)
    assert epoch_order([PromptSource("a", 4), PromptSource("b", 3)], seed=3, epoch=2) == order


def test_shares_follow_the_weights_until_the_scarcest_source_is_used_up() -> None:
    # 100 of a at 1/4 allow 400 in all; 120 of b at 3/4 allow 160: an epoch has 40 of a and 120 of b.
    assert shares([PromptSource("a", 100, 1.0), PromptSource("b", 120, 3.0)]) == [40, 120]
    assert shares([PromptSource("a", 5, 1.0), PromptSource("b", 1000, 0.001)]) == [5, 1]


def test_the_larger_source_takes_turns_before_it_repeats() -> None:
    sources = [PromptSource("a", 4, 1.0), PromptSource("b", 10, 1.0)]
    first, second = (set(epoch_order(sources, 1, epoch)) for epoch in (0, 1))
    assert first & second == {0, 1, 2, 3}
    assert len((first | second) - {0, 1, 2, 3}) == 8  # 4 and 4 of the 10, all different
    turns = [
        frozenset(at for epoch in (2 * turn, 2 * turn + 1) for at in epoch_order(sources, 1, epoch))
        for turn in range(8)
    ]
    assert len(set(turns)) > 1  # each time two others wait


@given(sources=SOURCES, seed=st.integers(0, 99), epoch=st.integers(0, 20))
def test_an_epoch_has_each_prompt_once_and_each_share_whole(sources: list[PromptSource], seed: int, epoch: int) -> None:
    order = epoch_order(sources, seed, epoch)
    assert len(set(order)) == len(order)
    starts = [sum(source.prompts for source in sources[:at]) for at in range(len(sources))]
    counted = [
        sum(start <= at < start + source.prompts for at in order) for start, source in zip(starts, sources, strict=True)
    ]
    assert counted == shares(sources)
    assert any(count == source.prompts for count, source in zip(counted, sources, strict=True))


@given(
    sources=SOURCES,
    rates=st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=1, max_size=20),
    stops=st.sets(st.integers(0, 60)),
)
def test_a_stream_that_is_restored_goes_on_as_one_that_was_never_stopped(
    sources: list[PromptSource], rates: list[float], stops: set[int]
) -> None:
    asked = prompts(sum(source.prompts for source in sources))

    def rests(rate: float) -> bool:
        return rate in (0.0, 1.0)

    def drawn(stops: set[int]) -> list[Draw]:
        stream, found = PromptStream(asked, 5, None, sources, rests), []
        for at in range(60):
            if at in stops:
                stream = PromptStream(asked, 5, stream.position(), sources, rests)
            found.append(stream.take())
            stream.judged(found[-1], rates[at % len(rates)])
        return found

    assert drawn(stops) == drawn(set())


def test_a_prompt_that_is_too_easy_or_too_hard_rests_for_one_epoch() -> None:
    stream = PromptStream(prompts(4), 1, rests=lambda rate: rate in (0.0, 1.0))
    rates = {"0": 1.0, "1": 0.5, "2": 0.0, "3": 0.25}
    epochs: list[set[str]] = []
    for size in (4, 2, 4, 2):
        draws = [stream.take() for _ in range(size)]
        epochs.append({draw.prompt.id for draw in draws})
        for draw in draws:
            stream.judged(draw, rates[draw.prompt.id])
    assert epochs == [{"0", "1", "2", "3"}, {"1", "3"}, {"0", "1", "2", "3"}, {"1", "3"}]


def test_where_every_prompt_would_rest_none_does_and_what_is_judged_too_late_does_not_count() -> None:
    stream = PromptStream(prompts(2), 1, rests=lambda rate: True)
    first, second = stream.take(), stream.take()
    stream.judged(first, 1.0)
    stream.judged(second, 1.0)
    assert {stream.take().prompt.id, stream.take().prompt.id} == {"0", "1"}
    stream.judged(first, 1.0)  # of the epoch before
    assert stream.position().left_out_next == ""


@given(st.integers(1, 3000), st.data())
def test_a_position_is_small_and_goes_on_however_many_prompts_rest(count: int, data: st.DataObject) -> None:
    """It is written with every flush of the ledger. An earlier stretto has saved the prompts by name."""
    asked = prompts(count)
    names = [set[str](), set[str]()]
    for some in names:
        first = data.draw(st.integers(0, count))
        some.update(prompt.id for prompt in asked[first :: data.draw(st.integers(1, 5))])
    old = Position(1, 0, (), tuple(names[0]), tuple(names[1]))
    position = PromptStream(asked, 1, old).position()
    assert len(msgspec.json.encode(position)) <= 2 * count / 6 + 150
    drawn = []
    for known in (old, msgspec.json.decode(msgspec.json.encode(position), type=Position)):
        stream = PromptStream(asked, 1, known)
        drawn.append([stream.take().group_id for _ in range(2 * count)])
    assert drawn[0] == drawn[1]
    epoch = [name for name in drawn[0] if name.startswith("1.")]
    assert {name.split(".")[1] for name in epoch} == {prompt.id for prompt in asked} - names[0] or not epoch
