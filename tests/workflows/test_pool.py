"""A workflow of the user's runs in a process of its own; whatever it does wrong fails its trajectory with the reason,
and harms no other one. One whose process ends begins again, and is answered from the record.

Promises about a workflow that stops to wait: a turn that it did not get is none of its turns and counts for no
limit, whether it was sampled or not, and is sampled no further; a call that was not made leaves a result on record, so
that a resume does not take it for one that a crash has cut short."""

import asyncio
import math
import multiprocessing
import os
import re
import signal
import subprocess
import uuid
from pathlib import Path
from typing import Any

import msgspec
import pytest

from stretto.core.errors import RefusedRequest, RewardFunctionError, RoleDied, WorkflowError
from stretto.core.forest import TurnRequest
from stretto.core.records import Outcome
from stretto_workflows import worker_process
from stretto_workflows.exchange import Exchange
from stretto_workflows.pool import WorkflowPool
from stretto_workflows.session import Session
from stretto_workflows.wire import RUN_MARK, CallOrder, MemberEnded
from stretto_workflows.worker_process import _OwnTime
from tests.launch.running import wait_until
from tests.launch.warm import session_server
from tests.workflows.benches import PROMPT, Bench, MakeBench, asks, decode, encode, lives, unusable


def sampled(session: Session) -> int:
    """Number of tokens of the turns that have ended."""
    return sum(one.length for one in session.forest.segments if one.stop_reason is not None)


def test_turns_calls_and_given_tokens_make_one_linear_trajectory(bench: MakeBench, tmp_path: Path) -> None:
    made = bench("Asks", {"turns": 3, "count": str(tmp_path / "count")})
    first, second = made.run()
    sampled = [segment for segment in first.segments if segment.sampled]
    given = [segment for segment in first.segments if not segment.sampled]
    assert [segment.reward for segment in sampled] == [0.0, 1.0, 2.0]
    assert [decode(segment.token_ids) for segment in given] == ["+6=", "+6="]  # the length of "17/0/0", twice
    assert all(segment.parent is None for segment in first.segments)
    assert first.verdict.rewards == {"right": first.verdict.reward}
    assert first.id == "0.17.0/0"
    assert first.segments != second.segments
    assert len((tmp_path / "count").read_text().splitlines()) == 6
    prompts = [request.prompt for request in made.model.asked if request.node == 4]
    held = PROMPT.token_ids + sum((segment.token_ids for segment in first.segments[:4]), start=())
    assert held in prompts  # what was said, as it was sampled


def test_branches_and_other_roles_are_a_forest(bench: MakeBench) -> None:
    [trajectory] = bench("Talks", members=1).run()
    causes = [segment.cause for segment in trajectory.segments if segment.cause]
    assert sorted(causes) == ["fork", "history_rewritten", "subagent"]
    assert sum(segment.sampled for segment in trajectory.segments) == 5
    assert trajectory.verdict.outcome is Outcome.WRONG


@pytest.mark.parametrize(
    ("kind", "settings", "reason"),
    [
        ("Raises", {}, "the workflow raised KeyError in .*users_own.py:[0-9]+: 'no such thing'"),
        ("Quotes", {}, r"the workflow raised ValueError in .*: no tool \\ud83d"),
        ("Exits", {}, "the workflow raised SystemExit .*: 3"),
        ("Waits", {}, "the workflow took more than 0.5 s of its own"),
        ("Floods", {}, "the workflow has more than 256 requests in progress"),
        ("Endless", {}, "the workflow raised RefusedRequest .*max_turns is 5"),
        (
            "Returns",
            {"what": "nothing"},
            r"the workflow \S+:Returns returned NoneType, not a number: None; a numb",
        ),
        ("Returns", {"what": "text"}, r"the workflow \S+:Returns returned str, not a number: '"),
        ("Returns", {"what": "nan"}, "Returns returned nan; a number"),
        ("Returns", {"what": "beyond"}, r"Returns returned 1e\+07; it must lie between ±1e\+06"),
        ("Returns", {"what": "turn beyond"}, r"Returns returned 1e\+300; it must lie between"),
        ("Returns", {"what": "part beyond"}, r"Returns returned -1e\+300; it must lie between"),
        ("Returns", {"what": "no turn"}, "the workflow has returned without a completion"),
        ("Returns", {"what": "foreign turn"}, "a reward to turn 7, which was not returned to it"),
        ("Returns", {"what": "turn from behind"}, "a reward to turn -1, which was not returned to it"),
        ("Mistakes", {"kind": "text"}, "TypeError .*: messages is str, not a list"),
        ("Mistakes", {"kind": "number"}, "TypeError .*: messages holds 3, which is no Mapping"),
        ("Mistakes", {"kind": "no role"}, "RefusedRequest .*: messages: .*role"),
        ("Mistakes", {"kind": "calls"}, "RefusedRequest .*: messages: AttributeError"),
        ("Mistakes", {"kind": "tokens"}, "TypeError .*: token_ids holds '3', which is no int"),
        ("Mistakes", {"kind": "limit"}, "RefusedRequest .*: sampling: max_tokens is 0"),
        ("Mistakes", {"kind": "letter"}, "RefusedRequest .*: messages: ValueError"),
        ("Mistakes", {"kind": "score"}, "TypeError .*: texts that are scored holds 7, which is no str"),
        ("Mistakes", {"kind": "object"}, "TypeError .*: Encoding objects of type object is unsupported"),
        ("Mistakes", {"kind": "turn"}, "TypeError: 'str' object cannot be interpreted as an integer"),
        (
            "Mistakes",
            {"kind": "answer"},
            "RefusedRequest .*: tool: the answer is too long; it has 67,108,... bytes; at most 67,108,864 are allowed",
        ),
        ("Mistakes", {"kind": "asked"}, "RefusedRequest .*: tool: what is asked is too long; it has 67,10"),
        ("Mistakes", {"kind": "forged"}, "continues turn 7, which no engine has sampled"),
        ("Mistakes", {"kind": "long message"}, "RefusedRequest .*: generate: what is asked is too long; it has 67,10"),
        ("Returns", {"what": "long name"}, "the workflow returned too long a reward: it has 67,10"),
        ("Returns", {"what": "half a letter"}, "the workflow returned a reward that cannot be sent: .*surrogates"),
        ("Returns", {"what": "far turn"}, "the workflow returned a reward that cannot be sent: "),
        ("Returns", {"what": "too many"}, "a reward to turn None, which was not returned to it"),
    ],
)
def test_what_goes_wrong_is_the_reason_and_never_a_reward(
    bench: MakeBench, kind: str, settings: dict[str, Any], reason: str
) -> None:
    turns = 1000 if kind == "Floods" else 5  # so that the flood is what goes wrong
    for trajectory in bench(kind, settings, deadline=0.5 if kind == "Waits" else 60.0, max_turns=turns).run():
        assert trajectory.verdict.outcome is Outcome.UNDECIDED
        assert trajectory.verdict.reward is None
        assert re.search(reason, trajectory.verdict.reason), trajectory.verdict.reason


@pytest.mark.parametrize("fields", [{"size": 10**30}, {"note": "\ud800"}])
def test_a_row_that_cannot_be_sent_fails_its_trajectory_and_no_other(fields: dict[str, Any], bench: MakeBench) -> None:
    class Strange(Bench):
        def exchange(self, member: int) -> Exchange:
            made = super().exchange(member)
            return made if member else replace_task(made, fields)

    made = bench("Asks", {"turns": 1})
    first, second = Strange(made.config, made.log).run()
    assert first.verdict.outcome is Outcome.UNDECIDED
    assert first.verdict.reason.startswith("its task cannot be sent to the workflow: ")
    assert second.verdict.outcome is not Outcome.UNDECIDED


def replace_task(exchange: Exchange, fields: dict[str, Any]) -> Exchange:
    exchange.task = msgspec.structs.replace(exchange.task, fields=fields)
    return exchange


def test_one_for_which_no_file_can_be_opened_fails_alone(bench: MakeBench) -> None:
    async def takes_time(request: TurnRequest) -> None:
        await asyncio.sleep(0.5)

    made = bench("Cramped", workers=1)
    made.model.on_turn = takes_time
    first, second = made.run()
    assert first.verdict.outcome is Outcome.RIGHT
    assert second.verdict.reason.endswith("Too many open files"), second.verdict.reason


async def test_a_thread_that_is_left_behind_holds_no_reward_up_and_ends_no_process(
    bench: MakeBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_process, "_GONE_SECONDS", 0.1)
    made = bench("Tires", deadline=4.0)
    async with WorkflowPool(made.config, made.log, say=made.said.append, spawner=session_server()) as pool:
        found = [await pool.run(made.exchange(member)) for member in range(2)]
        await asyncio.sleep(0.5)  # in which an abandoned trajectory would have worn its process out
    assert ([one.verdict.outcome for one in found], made.said) == ([Outcome.RIGHT, Outcome.RIGHT], [])


def test_one_that_hangs_fails_alone(bench: MakeBench) -> None:
    outcomes = [trajectory.verdict.outcome for trajectory in bench("Hangs", deadline=2.0, members=4).run()]
    assert outcomes == [Outcome.UNDECIDED, Outcome.RIGHT, Outcome.RIGHT, Outcome.RIGHT]


def test_processes_that_are_left_behind_hold_nothing_up_and_end_with_the_run(bench: MakeBench, tmp_path: Path) -> None:
    made = bench("Forks", {"notes": str(tmp_path / "notes")})
    assert [trajectory.verdict.outcome for trajectory in made.run()] == [Outcome.RIGHT] * 2
    left = (tmp_path / "notes").read_text().split()
    assert len(left) == 4
    wait_until(lambda: not any(map(lives, left)), "the end of what was left behind")


async def test_a_clock_that_is_closed_while_an_order_is_served_does_not_run_again() -> None:
    clock = _OwnTime(0.01)
    with clock.paused():
        clock.close()
    await asyncio.sleep(0.05)
    assert clock.over.cancelled()


def test_what_the_tools_leave_behind_is_not_kept_as_zombies(bench: MakeBench) -> None:
    [trajectory] = bench("Orphans", members=1).run()
    assert (trajectory.verdict.outcome, trajectory.verdict.reward) == (Outcome.WRONG, 0.0), trajectory.verdict.reason


def test_what_a_killed_conductor_has_left_behind_ends_when_its_run_goes_on(bench: MakeBench, tmp_path: Path) -> None:
    async def die(request: TurnRequest) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    made = bench("Forks", {"notes": str(tmp_path / "notes")})
    made.mark, made.members, made.model.on_turn = uuid.uuid4().hex, 1, die
    conductor = multiprocessing.get_context("fork").Process(target=made.run)
    conductor.start()
    conductor.join(60)
    assert conductor.exitcode == -signal.SIGKILL
    with subprocess.Popen(["sleep", "60"], env={**os.environ, RUN_MARK: uuid.uuid4().hex}) as of_another_run:
        left = (tmp_path / "notes").read_text().split()
        assert list(map(lives, left)) == [True, True]
        made.model.on_turn = None
        made.run()
        assert not any(map(lives, left))
        assert of_another_run.poll() is None
        of_another_run.kill()


def test_one_that_ends_its_process_each_time_fails_in_the_end(bench: MakeBench) -> None:
    made = bench("Dies", members=1)
    [trajectory] = made.run()
    assert trajectory.verdict.reason == "its process ended 3 times: the last one ended with exit code 3"
    assert len(made.model.asked) == 1  # the turn was on record


def test_after_the_process_is_killed_its_trajectories_go_on_and_call_nothing_twice(
    bench: MakeBench, tmp_path: Path
) -> None:
    made = bench("Asks", {"turns": 4, "count": str(tmp_path / "count")}, members=1)
    undisturbed = bench("Asks", {"turns": 4, "count": str(tmp_path / "other")}, members=1).run()

    async def kill_in_the_third_turn(request: TurnRequest) -> None:
        if request.node == 4 and not made.said:
            assert made.pool is not None
            [worker] = made.pool._workers.values()
            os.kill(worker._process.pid, signal.SIGKILL)
            await asyncio.sleep(0.2)

    made.model.on_turn = kill_in_the_third_turn
    assert made.run() == undisturbed
    lines = (tmp_path / "count").read_text().splitlines()
    assert sorted(lines) == sorted((tmp_path / "other").read_text().splitlines())
    assert len(set(lines)) == len(lines) == 4
    assert len(made.said) == 1


def test_rewards_by_turn_are_those_of_the_turns_that_this_process_was_given(bench: MakeBench) -> None:
    made = bench("Asks")
    asyncio.run(made.exchange(0).turn(asks("1+1=")))  # an orphan: the workflow does not ask for it again
    after = made.exchange(0)
    first, second = (asyncio.run(after.turn(asks(text))).reply for text in ("2+2=", "3+3="))
    assert first is not None
    assert second is not None
    made_of = after.trajectory(MemberEnded(0, 1.0, {-1: 0.25, -2: 0.5}))
    assert [(one.token_ids, one.reward) for one in made_of.segments if one.sampled] == [
        (first.token_ids, 0.25),
        (second.token_ids, 0.5),
    ]
    for strange in ({-3: 0.75}, {1: 0.75}):
        verdict = after.trajectory(MemberEnded(0, 1.0, strange)).verdict
        assert (verdict.outcome, verdict.reward) == (Outcome.UNDECIDED, None)
        assert "which was not returned to it" in verdict.reason


@pytest.mark.parametrize("told", [math.nan, math.inf, -1e300, 1_000_001.0])
def test_a_process_that_says_what_its_workflow_cannot_return_gives_no_reward(bench: MakeBench, told: float) -> None:
    exchange = bench("Asks").exchange(0)
    asyncio.run(exchange.turn(asks("1+1=")))
    for ended in (MemberEnded(0, told), MemberEnded(0, 1.0, {-1: told}), MemberEnded(0, 1.0, {}, {"form": told})):
        verdict = exchange.trajectory(ended).verdict
        assert (verdict.outcome, verdict.reward) == (Outcome.UNDECIDED, None)
        assert verdict.reason.startswith("the workflow returned ")


def test_a_turn_that_is_refused_costs_nothing_of_the_budget(bench: MakeBench) -> None:
    made = bench("Asks", max_turns=1, max_tokens=4)
    exchange = made.exchange(0)

    async def refuse(request: TurnRequest) -> None:
        if len(made.model.asked) == 1:
            raise RefusedRequest("stop", "a text", "other texts")

    made.model.on_turn = refuse
    with pytest.raises(RefusedRequest, match="stop"):
        asyncio.run(exchange.turn(asks("1+1=")))
    reply = asyncio.run(exchange.turn(asks("1+1="))).reply
    assert reply is not None
    assert len(reply.token_ids) == 2
    with pytest.raises(RefusedRequest, match="max_turns is 1"):
        asyncio.run(exchange.turn(asks("1+1=")))


@pytest.mark.parametrize("budget", [4, 9, 11, 16, 100])
async def test_parallel_turns_share_the_budget_and_are_refused_only_once_it_is_sampled(
    bench: MakeBench, budget: int
) -> None:
    """A turn may sample 4 tokens and samples 2 of them: a budget of 9 has room for two turns at once, and for 5 turns
    in all, the last one after 8 tokens."""
    made = bench("Asks", max_tokens=budget)
    exchange, open_turns, most = made.exchange(0), 0, 0

    async def ends_late(request: TurnRequest) -> None:
        nonlocal open_turns, most
        open_turns += request.sampling.max_tokens
        most = max(most, open_turns + sampled(exchange.session))
        await asyncio.sleep(0.001 * (request.node % 3))
        open_turns -= request.sampling.max_tokens

    made.model.on_turn = ends_late
    asked = (exchange.turn(asks(f"1+{number}=")) for number in range(6))
    found = list(await asyncio.gather(*asked, return_exceptions=True))
    served = min(6, math.ceil(budget / 2))
    assert [type(one) for one in found].count(RefusedRequest) == 6 - served
    assert {str(one) for one in found if isinstance(one, RefusedRequest)} <= {
        f"generate: {2 * served} tokens are sampled; workflow.max_tokens is {budget}"
    }
    assert most <= budget
    assert sampled(exchange.session) == 2 * served


def test_a_reward_function_that_is_none_ends_the_run_and_is_no_fault_of_the_workflow(bench: MakeBench) -> None:
    made = bench("Catches")
    made.score = unusable
    with pytest.raises(RewardFunctionError, match="returned None"):
        made.run()


def test_a_workflow_that_leaves_out_a_call_that_was_cut_short_is_undecided(bench: MakeBench) -> None:
    made = bench("Asks")
    before = made.exchange(0)

    async def pay() -> bytes:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        asyncio.run(before.call(CallOrder(0, 0, b"pay", repeatable=False), pay))
    after = made.exchange(0)
    asyncio.run(after.turn(asks("1+1=")))
    verdict = after.trajectory(MemberEnded(0, 1.0)).verdict
    assert (verdict.outcome, verdict.reward) == (Outcome.UNDECIDED, None)
    assert verdict.reason == "the call 'callpay' of 0.17.0/0 was cut short, and is not made a second time"


@pytest.mark.parametrize("deaths", [0, 2], ids=["at its first try", "at its last"])
async def test_what_still_runs_when_the_pool_is_closed_ends_with_it(bench: MakeBench, deaths: int) -> None:
    made, killed = bench("Waits", members=1, deadline=60.0), set[int]()
    async with WorkflowPool(made.config, made.log, spawner=session_server()) as pool:
        running = asyncio.create_task(pool.run(made.exchange(0)))
        for left in reversed(range(deaths + 1)):
            while not any(worker.load and not killed & {*worker.pids} for worker in pool._workers.values()):
                await asyncio.sleep(0.01)
            if left:
                killed.add(pool.pids[0])
                os.kill(pool.pids[0], signal.SIGKILL)
    with pytest.raises(RoleDied, match="was closed"):
        await asyncio.wait_for(running, 10.0)


def test_a_run_in_which_most_trajectories_fail_stops_with_the_reason(bench: MakeBench) -> None:
    made = bench("Raises", members=70)
    with pytest.raises(WorkflowError, match=r"64 of the last 64 trajectories failed, the last one: .* KeyError"):
        made.run()


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        ("multi_turns", {}, "no built-in workflow is called 'multi_turns'; did you mean 'multi_turn'?"),
        ("Askz", {}, "has no 'Askz'; did you mean 'Asks'?"),
        ("Asks", {"turn": 3}, "workflow.settings.turn: .* has no such setting; did you mean 'turns'?"),
        ("environment", {"turn": 3}, "(?s)no such setting; did you mean 'turns'.*workflow.settings.make: missing; "),
        ("multi_turn", {"tries": 0}, "cannot be made: ValueError: tries is 0"),
        ("user_simulator", {"turns": 0}, "cannot be made: ValueError: turns is 0"),
        ("Path", {}, "is <class 'pathlib.*Path'>; a workflow is a class with 'async def run"),
    ],
)
def test_a_workflow_that_cannot_be_used_is_refused_before_the_run(
    bench: MakeBench, kind: str, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(WorkflowError, match=message):
        bench(kind, settings).run()


@pytest.mark.parametrize("seconds", [0.0, 0.5])
def test_a_turn_that_the_workflow_stopped_to_wait_for_is_not_among_its_turns(bench: MakeBench, seconds: float) -> None:
    # With 0.5 the turn has ended when it is cancelled. The limits leave room for one turn.
    [trajectory] = bench("Hurries", {"seconds": seconds}, max_turns=1, max_tokens=2, members=1).run()
    assert trajectory.verdict.outcome is Outcome.RIGHT
    [turn] = [segment for segment in trajectory.segments if segment.sampled]
    assert turn.reward == 0.25
    [prompt] = [segment.token_ids for segment in trajectory.segments if not segment.sampled]
    assert prompt == encode("5+6=")


def test_a_turn_that_nobody_waits_for_is_sampled_no_further(bench: MakeBench, tmp_path: Path) -> None:
    broken_off, begun = asyncio.Event(), tmp_path / "begun"

    async def one_after_the_other(request: TurnRequest) -> None:
        if request.prompt[-4:] == encode("5+6="):
            await asyncio.wait_for(broken_off.wait(), 20)
            return
        try:
            begun.touch()
            await asyncio.sleep(60)
        finally:
            broken_off.set()

    made = bench("Hurries", {"begun": str(begun)})
    made.members, made.model.on_turn = 1, one_after_the_other
    [trajectory] = made.run()
    assert trajectory.verdict.outcome is Outcome.RIGHT


def test_a_turn_whose_sampler_takes_time_to_break_off_counts_for_no_limit(bench: MakeBench, tmp_path: Path) -> None:
    begun = tmp_path / "begun"

    async def slow_to_leave(request: TurnRequest) -> None:
        if request.prompt[-4:] == encode("5+6="):
            return
        begun.touch()
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0.2)

    made = bench("Hurries", {"begun": str(begun)}, max_turns=1, max_tokens=2, members=1)
    made.model.on_turn = slow_to_leave
    [trajectory] = made.run()
    assert trajectory.verdict.outcome is Outcome.RIGHT


def test_a_call_that_was_cancelled_before_it_was_made_is_on_record_as_that(bench: MakeBench, tmp_path: Path) -> None:
    made = bench("Hesitates", {"paid": str(tmp_path / "paid")}, members=1)
    assert [one.verdict.outcome for one in made.run()] == [Outcome.RIGHT]
    assert [(call.reply or b"").partition(b":")[0] for call in made.records[0].calls] == [b"CancelledError"]
    assert not (tmp_path / "paid").exists()
    assert [one.verdict.outcome for one in made.run()] == [Outcome.RIGHT]  # after a crash
