"""A reward that is slower than generation.

Promises: it is named, once in the log and in the metrics for as long as it lasts; work that both share alike, idle
rewards and short bursts are no reason to speak.
"""

from __future__ import annotations

from stretto.loop.records.alarms import SlowReward


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


def test_work_that_is_told_late_counts_where_it_was_done() -> None:
    slow = SlowReward("judge", workers=1)
    for at in range(40):  # one answer takes eight seconds, and its worker tells so at its end
        slow.poll(float(at), {"rewards": 8.0 * (at // 8), "engine-0": 0.3 * at})
    assert slow.found in ("", "judge")
    for at in range(40, 60):  # it has caught up
        slow.poll(float(at), {"rewards": 40.0, "engine-0": 0.3 * 40 + 0.9 * (at - 40)})
    assert slow.found == ""
