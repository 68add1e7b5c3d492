"""What a person is told of the completions while a run trains.

Promises: now and then a completion is shown and kept with its prompt, gold answer, versions and reward, right and
wrong ones beside each other; that none has been right is said by name, at twice as many groups each time; each kind of
undecided verdict is said once, with its reason. A reward that is slower than generation is named, once in the log and
in the metrics for as long as it lasts; work that both share alike, idle rewards and short bursts are no reason for it.
"""

from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.core.records import Outcome, Prompt, Segment, StopReason, Trajectory, Verdict
from stretto.loop.records.alarms import SlowReward, WatchedSamples, line
from stretto.store.run_folder import RunFolder
from stretto.store.series.metrics import SampledCompletion, rewind_samples
from stretto.store.series.progress import LONGEST

PROMPT = Prompt(id="17", token_ids=(5,), text="3+8=", answer="11")
WRONG = Verdict(outcome=Outcome.WRONG, reward=0.0)
RIGHT = Verdict(outcome=Outcome.RIGHT, reward=1.0)


def undecided(reason: str) -> Verdict:
    return Verdict(outcome=Outcome.UNDECIDED, reward=None, reason=reason)


def trajectory(verdict: Verdict, text: str = "3+8=12", versions: tuple[int, ...] = (6, 6, 7)) -> Trajectory:
    segment = Segment.of((1, 2, 3)[: len(versions)], (0.0,) * len(versions), versions, 0, StopReason.STOP)
    return Trajectory(id="0.17.0/0", segments=(segment,), verdict=verdict, text=text)


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder(tmp_path)


def test_a_right_and_a_wrong_completion_are_shown_beside_each_other_and_kept(folder: RunFolder) -> None:
    said: list[str] = []
    sampled = WatchedSamples(folder, said.append, seconds=3600)
    for _ in range(3):  # of which one is due
        sampled.judged(PROMPT, [trajectory(WRONG), trajectory(WRONG), trajectory(RIGHT, "3+8=11", (7,))])
    assert said == [
        "sample v6-7: '3+8=' -> '3+8=12' | gold '11' | wrong, reward 0",
        "sample v7: '3+8=' -> '3+8=11' | gold '11' | right, reward 1",
    ]
    kept = [msgspec.json.decode(row, type=SampledCompletion) for row in folder.samples.read_bytes().splitlines()]
    assert [(sample.completion, sample.versions, sample.reward) for sample in kept] == [
        ("3+8=12", (6, 7), 0.0),
        ("3+8=11", (7,), 1.0),
    ]
    WatchedSamples(folder, said.append, seconds=0).judged(PROMPT, [trajectory(RIGHT)])
    assert len(said) == 2


def test_a_long_completion_is_shown_with_both_ends() -> None:
    shown = line(SampledCompletion.of(PROMPT, trajectory(WRONG).versions, f"first{'x' * 10_000}last", WRONG))
    assert len(shown) == LONGEST
    assert "'first" in shown
    assert "last'" in shown


@given(st.text(max_size=300), st.text(max_size=300), st.text(max_size=300), st.text(max_size=300))
def test_a_sample_has_one_line_of_bounded_length_whatever_its_texts_are(
    prompt: str, completion: str, gold: str, reason: str
) -> None:
    sample = SampledCompletion(10_000, "17", prompt, gold, completion, Outcome.UNDECIDED, None, reason, (9_998, 10_000))
    shown = line(sample)
    assert len(shown) <= LONGEST
    assert len(shown.splitlines()) == 1


def test_that_no_completion_has_been_right_is_said_at_twice_as_many_groups_each_time(folder: RunFolder) -> None:
    said: list[str] = []
    sampled = WatchedSamples(folder, said.append, seconds=0)
    for _ in range(100):
        sampled.judged(PROMPT, [trajectory(WRONG)] * 8)
    first, second = said  # at 32 and 64 groups
    assert first.startswith("no completion has been right so far: 32 groups, 256 completions; look at ")
    assert second.startswith("no completion has been right so far: 64 groups, 512 completions; look at ")
    sampled.judged(PROMPT, [trajectory(RIGHT)])
    for _ in range(100):
        sampled.judged(PROMPT, [trajectory(WRONG)])
    assert len(said) == 2


def test_each_kind_of_undecided_verdict_is_said_once_with_its_reason(folder: RunFolder) -> None:
    said: list[str] = []
    sampled = WatchedSamples(folder, said.append, seconds=0)
    raised = "the reward raised ValueError in judge.py:14"
    for number in range(3):
        verdicts = [undecided(f"{raised}: no {number}"), undecided("timeout after 1 s"), RIGHT]
        sampled.judged(PROMPT, [trajectory(verdict) for verdict in verdicts])
    assert [sentence.partition(" (said once")[0] for sentence in said] == [
        f"a completion is undecided: {raised}: no 0",
        "a completion is undecided: timeout after 1 s",
    ]


def test_a_run_that_goes_on_forgets_the_evaluations_that_it_makes_again(folder: RunFolder) -> None:
    samples = [SampledCompletion.of(PROMPT, trajectory(RIGHT, versions=(v,)).versions, "11", RIGHT) for v in (0, 4, 8)]
    WatchedSamples(folder, print, seconds=0).held_out(samples)
    rewind_samples(folder.held_out, 4)
    kept = [msgspec.json.decode(row, type=SampledCompletion) for row in folder.held_out.read_bytes().splitlines()]
    assert kept == samples[:2]


def watched(judging: float, generating: float, seconds: int = 30, since: float = 100.0) -> tuple[SlowReward, list[str]]:
    """A reward that works `judging` seconds in a second, and two engines of which the busier works `generating`."""
    slow, told = SlowReward("slow_tests:judge", workers=2), []
    for at in range(seconds + 1):
        work = {"rewards": at * judging, "engine-0": 0.1 * at, "engine-1": at * generating, "trainer": 1.0 * at}
        told.append(slow.poll(since + at, work))
    return slow, [sentence for sentence in told if sentence]


def test_a_saturated_reward_beside_engines_that_wait_is_named_once() -> None:
    slow, told = watched(0.98, 0.4)
    assert slow.found == "slow_tests:judge"
    assert told == [
        "the reward 'slow_tests:judge' is slower than generation: its workers are busy 98% of the time, the busiest "
        "engine 40%; rewards.workers = 2 may be too few"
    ]


def test_nothing_is_said_before_ten_seconds_were_seen() -> None:
    assert watched(1.0, 0.1, seconds=9)[1] == []
    assert len(watched(1.0, 0.1, seconds=10)[1]) == 1


def test_a_reward_that_keeps_up_is_not_named() -> None:
    for judging, generating in ((0.5, 0.9), (0.85, 0.2), (0.97, 0.95), (0.0, 0.0)):
        slow, told = watched(judging, generating)
        assert (slow.found, told) == ("", [])


def test_the_busiest_engine_is_that_of_the_moment_and_not_that_of_the_whole_run() -> None:
    slow = SlowReward("judge", workers=1)
    for at in range(30):  # engine-0 has worked for long, and has left
        slow.poll(float(at), {"rewards": 1.0 * at, "engine-0": 500.0, "engine-1": 1.0 * at})
    assert slow.found == ""


def test_work_that_is_told_late_counts_where_it_was_done() -> None:
    slow = SlowReward("judge", workers=1)
    for at in range(40):  # one answer takes eight seconds, and its worker tells so at its end
        slow.poll(float(at), {"rewards": 8.0 * (at // 8), "engine-0": 0.3 * at})
    assert slow.found in ("", "judge")
    for at in range(40, 60):  # it has caught up
        slow.poll(float(at), {"rewards": 40.0, "engine-0": 0.3 * 40 + 0.9 * (at - 40)})
    assert slow.found == ""
