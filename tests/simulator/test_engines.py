"""Promises of the virtual clock: it jumps from event to event in order, and never goes back. Promises of simulated
engines:

- the seconds of a step follow its rows and its cache, and a completion takes the steps that it has tokens;
- completions beyond the slots, or beyond the cache, wait; when the cache is full the newest leaves and is recomputed;
- a load pauses generation for its seconds and, where it recomputes, for those of the contexts; tokens before it keep
  their version; two loads keep their distance, and an idle engine loads at once;
- groups go to the engine with the fewest completions; admission waits for the slowest of them;
- a report that begins after warm steps counts the later ones alone, and one token can stand for several."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import repeat

import pytest

from stretto.core.records import Prompt
from stretto.rollout.config import RolloutConfig
from stretto.rollout.controller import Ticket
from stretto.rollout.prompts import PromptStream
from stretto_foresight.simulator.engines import EngineLimits, Flight, SimulatedEngine, VirtualClock
from stretto_foresight.simulator.run import SimulatedRun


@dataclass(frozen=True)
class Seconds:
    """A row of a step takes a second, a cached token nothing but what is said; the rest takes what is said."""

    row: float = 1.0
    cached: float = 0.0
    context: float = 0.0
    way: float = 0.0
    pause: float = 0.0
    judging: float = 0.0
    step: float = 1.0

    def decode(self, rows: int, cached: float) -> float:
        return self.row * rows + self.cached * cached

    def prefill(self, contexts: Sequence[float]) -> float:
        return self.context * sum(contexts)

    def transfer(self) -> float:
        return self.way

    def load(self) -> float:
        return self.pause

    def judge(self) -> float:
        return self.judging

    def train(self, sequences: Sequence[int]) -> float:
        return self.step


@dataclass(frozen=True)
class Same:
    """Completions of one length."""

    length: int
    prompt_tokens: int = 2
    failure_rate: float = 0.0
    filter_rate: float = 0.0

    def groups(self, chance: random.Random, members: int) -> Iterator[tuple[int, ...]]:
        return repeat((self.length,) * members)


class Bench:
    """One engine, and when which group of it ended."""

    def __init__(self, seconds: Seconds, limits: EngineLimits) -> None:
        self.clock = VirtualClock()
        self.ended: list[tuple[float, int, tuple[int, ...]]] = []
        self.loads: list[float] = []
        self.engine = SimulatedEngine(
            self.clock, seconds, limits, self._note, lambda: self.loads.append(self.clock.now())
        )
        self._prompts = PromptStream([Prompt(id="a", token_ids=(0,), text="", answer="")], 1)

    def _note(self, flight: Flight) -> None:
        for versions in flight.versions.values():
            self.ended.append((self.clock.now(), len(versions), versions))

    def start(self, *lengths: int, prompt: int = 2) -> Flight:
        draw = self._prompts.take()
        flight = Flight(Ticket(0, draw.group_id, draw, 0, (0,) * len(lengths)), prompt, lengths)
        self.engine.start(flight)
        return flight

    def run(self) -> list[tuple[float, int]]:
        while self.clock.advance():
            pass
        return [(when, length) for when, length, _ in self.ended]


def test_a_step_takes_as_long_as_its_rows() -> None:
    """Two rows: 3 steps of 2 s end the first, 2 steps of 1 s the second."""
    bench = Bench(Seconds(), EngineLimits())
    bench.start(3)
    bench.start(5)
    assert bench.run() == [(6.0, 3), (8.0, 5)]
    assert (bench.engine.sampled, bench.engine.busy) == (8, 8.0)


def test_a_step_takes_as_long_as_its_cache_in_the_middle() -> None:
    """Four steps over a prompt of 2: the cache has 2, 3, 4, 5 and then 6 tokens, 4 in the middle, 0.5 s each."""
    bench = Bench(Seconds(row=1.0, cached=0.5), EngineLimits())
    bench.start(4)
    assert bench.run() == [(4 * (1 + 4 * 0.5), 4)]


def test_a_prompt_is_computed_once_for_its_group_before_the_first_token() -> None:
    bench = Bench(Seconds(context=1.0), EngineLimits())
    bench.start(3, 3, prompt=5)
    assert bench.run()[-1] == (5.0 + 3 * 2, 3)


def test_completions_beyond_the_slots_wait() -> None:
    bench = Bench(Seconds(), EngineLimits(slots=1))
    bench.start(2)
    bench.start(3)
    assert bench.run() == [(2.0, 2), (5.0, 3)]


def test_the_newest_leaves_a_full_cache_and_is_recomputed() -> None:
    """A cache of 32: two rows with prompts of 10 fill it after 6 steps of 2 s; the newer leaves with its 6 tokens, and
    the older ends alone at its 12th. Then the newer computes 16 tokens, 0.1 s each, and has 6 more, 1 s each."""
    bench = Bench(Seconds(context=0.1), EngineLimits(cache_tokens=32))
    bench.start(12, prompt=10)
    bench.start(12, prompt=10)
    (first, _), (second, _) = bench.run()
    assert first == pytest.approx(2.0 + 6 * 2 + 6)
    assert second == pytest.approx(first + 1.6 + 6)
    assert (bench.engine.preempted, bench.engine.recomputed) == (1, 16)


def test_an_engine_tells_what_is_needed_of_its_rows_and_its_cache() -> None:
    """Two rows of 10 tokens in a cache of 50, and 2 of 4 slots; then a row that does not fit waits, and counts like the
    mean of those that run. After 6 steps of 2 s they have 16 tokens each."""
    bench = Bench(Seconds(), EngineLimits(slots=4, cache_tokens=50))
    for prompt in (10, 10):
        bench.start(12, prompt=prompt)
    assert bench.engine.needed() == 2 / 4
    bench.start(12, prompt=40)
    assert bench.engine.needed() == (10 + 10 + 40) / 50
    seen: list[float] = []
    bench.clock.call_at(12.0, lambda: seen.append(bench.engine.needed()))
    bench.run()
    assert seen == [pytest.approx((16 + 16 + 40) / 50)]


def test_a_load_pauses_recomputes_and_divides_the_versions() -> None:
    """3 of 6 tokens, a load of 2 s, 5 tokens recomputed at 0.2 s, 3 more tokens. The prompt took 0.4 s."""
    bench = Bench(Seconds(context=0.2, pause=2.0), EngineLimits())
    bench.start(6)
    bench.clock.call_at(3.4, lambda: bench.engine.arrives(4))
    ((when, _),) = bench.run()
    assert when == pytest.approx(3.4 + 2.0 + 1.0 + 3.0)
    assert bench.ended[0][2] == (0, 0, 0, 4, 4, 4)
    assert bench.loads == [pytest.approx(5.4)]


def _join(bench: Bench) -> None:
    bench.start(1, prompt=0)


def test_a_completion_that_comes_in_mid_step_begins_with_the_next_one() -> None:
    """A step of two rows takes 1 s. A third comes after half of it; the rest then takes 0.75 s, and a step of three
    1.5 s: its only token is there with the second one of the others, at 2.75 s. With grains it begins at once."""
    ended: dict[int, list[tuple[float, int]]] = {}
    for grain in (1, 2):
        bench = Bench(Seconds(row=0.5 / grain), EngineLimits(grain=grain))
        bench.start(2, 2, prompt=0)
        bench.clock.call_at(0.5, partial(_join, bench))
        ended[grain] = bench.run()
        assert bench.engine.sampled == pytest.approx(5 * grain)
    assert [when for when, _ in ended[1]] == pytest.approx([2.75] * len(ended[1]))
    assert ended[2][0][0] == pytest.approx(0.5 + 1.5)
    assert ended[2][0][1] == 1


def test_an_idle_engine_begins_at_once() -> None:
    """Its only completion is aborted in the midst of a step; the next one has a token, and a step of a second."""
    bench = Bench(Seconds(), EngineLimits())
    flight = bench.start(4, prompt=0)

    def abort() -> None:
        bench.engine.stop(flight)

    bench.clock.call_at(0.5, abort)
    bench.clock.call_at(0.75, partial(_join, bench))
    ((when, _),) = bench.run()
    assert when == pytest.approx(1.75)


def test_a_load_computes_the_prompt_of_a_group_once() -> None:
    """Two completions with 3 of 6 tokens each when the weights come: the prompt's 2 tokens, and 3 and 3."""
    bench = Bench(Seconds(row=0.5, pause=2.0), EngineLimits())
    bench.start(6, 6)
    bench.clock.call_at(3.0, lambda: bench.engine.arrives(1))
    bench.run()
    assert bench.engine.recomputed == 2 + 3 + 3


def test_a_cache_that_is_kept_is_not_recomputed() -> None:
    bench = Bench(Seconds(context=0.2, pause=2.0), EngineLimits(recompute=False))
    bench.start(6)
    bench.clock.call_at(3.4, lambda: bench.engine.arrives(1))
    ((when, _),) = bench.run()
    assert when == pytest.approx(8.4)
    assert bench.engine.recomputed == 0


def test_loads_keep_their_distance_and_an_idle_engine_does_not_wait() -> None:
    """Loads at 1 s; the next at 1 + 4 s, of the newest version; the engine is idle from 8 s on."""
    bench = Bench(Seconds(), EngineLimits(load_interval=4.0))
    bench.start(8)
    for when, version in ((1.0, 1), (2.0, 2), (3.0, 3), (7.5, 4)):
        bench.clock.call_at(when, lambda version=version: bench.engine.arrives(version))  # type: ignore[misc]
    bench.run()
    assert (bench.loads, bench.ended[0][2]) == ([1.0, 5.0, 8.0], (0, 1, 1, 1, 1, 3, 3, 3))


def test_an_aborted_group_leaves_with_what_it_has() -> None:
    bench = Bench(Seconds(), EngineLimits(slots=2))
    kept, stopped = bench.start(4), bench.start(9, 1)
    sampled: list[list[int]] = []
    bench.clock.call_at(4.0, lambda: sampled.append(bench.engine.stop(stopped)))
    assert bench.run() == [(6.0, 4)]  # 2 steps of 2 s, 2 of 1 s
    assert sampled == [[2, 0]]
    assert len(kept.versions) == 1


def test_what_left_a_full_cache_counts_when_its_group_is_aborted() -> None:
    """Two rows with prompts of 10 fill a cache of 32 after 6 steps of 2 s. The newer leaves and waits with 6 tokens
    until it is aborted; the older has 6 more steps of 1 s."""
    bench = Bench(Seconds(), EngineLimits(cache_tokens=32))
    bench.start(12, prompt=10)
    stopped = bench.start(12, prompt=10)
    sampled: list[list[int]] = []
    bench.clock.call_at(15.0, lambda: sampled.append(bench.engine.stop(stopped)))
    assert bench.run() == [(18.0, 12)]
    assert sampled == [[6]]


def test_two_engines_share_the_groups_and_a_step_takes_half() -> None:
    """Synchronous batches of 4 completions of 5 tokens: 5 steps of 4 s with one engine, of 2 s with two; 1 s of
    judging, or 2 s where two judge at a time, and 1 s of training."""
    config = RolloutConfig(batch_size=4, group_size=1, max_in_flight=4, max_staleness=0)
    for engines, judges, seconds in ((1, 4, 22.0), (2, 4, 12.0), (1, 2, 23.0)):
        limits, durations = EngineLimits(count=engines), Seconds(judging=1.0)
        run = SimulatedRun(config, Same(5), 6, 1, durations=durations, limits=limits, warm=2, judges=judges)
        report = run.run()
        assert report.steps == 4
        assert report.seconds == pytest.approx(4 * seconds)
        assert report.training == pytest.approx(4.0)
        assert report.waiting == pytest.approx(4 * (seconds - 1.0))
        assert report.judging == pytest.approx(4 * 4.0)
        assert report.sampled == 4 * 20
        assert report.staleness_quantile(0.99) == 0


def test_a_token_can_stand_for_several() -> None:
    """12 tokens as 3 of 4: as many steps, as much cache."""
    config = RolloutConfig(batch_size=2, group_size=2, max_in_flight=4, max_staleness=2)
    seconds = Seconds(cached=0.1, context=0.1, step=100.0)
    fine = SimulatedRun(config, Same(12), 8, 1, durations=seconds).run()
    coarse = SimulatedRun(config, Same(3), 8, 1, durations=seconds, limits=EngineLimits(grain=4)).run()
    assert coarse.seconds == pytest.approx(fine.seconds)
    assert coarse.sampled == pytest.approx(fine.sampled)
    assert coarse.mean_staleness == pytest.approx(fine.mean_staleness, abs=0.2)


def test_events_of_one_moment_run_in_the_order_in_which_they_were_asked_for() -> None:
    clock, seen = VirtualClock(), list[str]()
    for name in "abc":
        clock.call_at(1.0, lambda name=name: seen.append(name))  # type: ignore[misc]
    while clock.advance():
        pass
    assert seen == ["a", "b", "c"]


def test_an_event_may_schedule_another() -> None:
    clock, seen = VirtualClock(), list[float]()
    clock.call_at(1.0, lambda: clock.call_after(2.0, lambda: seen.append(clock.now())))
    while clock.advance():
        pass
    assert seen == [3.0]


def test_nothing_is_scheduled_in_the_past() -> None:
    clock = VirtualClock()
    clock.call_at(2.0, lambda: None)
    clock.advance()
    with pytest.raises(ValueError, match=r"it is 2\.0 already"):
        clock.call_at(1.0, lambda: None)
