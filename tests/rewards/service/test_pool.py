"""The reward service, with real processes.

Promises: one verdict per answer, in order, whatever the reward does; an answer that hangs or kills its worker is
undecided with its reason and costs the others nothing; the slot always comes back; nothing is left after `close`.
"""

import asyncio
import errno
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

import pytest

from stretto.core.errors import DeadlineExceeded, RewardFunctionError, RoleDied
from stretto.core.frames import frame
from stretto.core.records import Outcome, Verdict
from stretto.rewards.config import RewardsConfig
from stretto.rewards.service import process
from stretto.rewards.service.pool import RewardPool, check_reward
from stretto.rewards.service.wire import ScoreItem, Verdicts
from tests.asynchronous import until
from tests.rewards.service.pool_module import MODULE

Result = TypeVar("Result")


def run(work: Coroutine[None, None, Result]) -> Result:
    return asyncio.run(asyncio.wait_for(work, 60))


def items(*completions: str, answer: str = "ok") -> list[ScoreItem]:
    return [ScoreItem(prompt="", completion=completion, answer=answer) for completion in completions]


def children() -> list[int]:
    """The workers that this process has started and not yet reaped."""
    started = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    commands = {int(pid): Path(f"/proc/{pid}/cmdline").read_bytes() for pid in started}  # of a zombie it is empty
    return [pid for pid, command in commands.items() if not command or b"stretto.rewards.service.worker" in command]


def runs(pid: int) -> bool:
    status = Path(f"/proc/{pid}/status")
    return status.exists() and "State:\tZ" not in status.read_text()


def outcomes(verdicts: list[Verdict]) -> list[str]:
    return [verdict.outcome.value for verdict in verdicts]


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., RewardsConfig]:
    (tmp_path / "pool_rewards.py").write_text(MODULE)
    (tmp_path / "broken_rewards.py").write_text("import nothing_of_the_kind")
    (tmp_path / "stuck_rewards.py").write_text("import time; time.sleep(600)")
    (tmp_path / "dying_rewards.py").write_text("import os; os._exit(7)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    def make(function: str = "pool_rewards:reward", **settings: object) -> RewardsConfig:
        return RewardsConfig.model_validate({"function": function, "timeout": 0.3} | settings)

    return make


Make = Callable[..., RewardsConfig]


def scored(config: RewardsConfig, work: Callable[[RewardPool], Awaitable[Result]], **settings: Any) -> Result:
    async def main() -> Result:
        async with RewardPool(config, **settings) as pool:
            return await work(pool)

    return run(main())


async def test_verdicts_come_back_in_order_for_many_callers_at_once_for_a_group_and_for_nothing(config: Make) -> None:
    async with RewardPool(config(workers=2)) as pool:
        assert await pool.score([]) == []
        group = pool.score_group("3+8=", ["ok", "no"], "ok")
        unspeakable = pool.score(items("ok", "\ud800", "no"))  # a text that no wire can carry
        many = [pool.score(items(*["ok", "no"] * 4)) for _ in range(50)]
        first, second, *others = map(outcomes, await asyncio.gather(group, unspeakable, *many))
    assert (first, second) == (["right", "wrong"], ["right", "undecided", "wrong"])
    assert others == [["right", "wrong"] * 4] * 50


async def test_an_answer_that_hangs_is_undecided_and_the_others_are_scored(config: Make) -> None:
    async with RewardPool(config(workers=1)) as pool:
        start = time.monotonic()
        first = await pool.score(items("ok", "no", "hang", "ok"))
        assert time.monotonic() - start >= 0.3
        assert outcomes(await pool.score(items("ok"))) == ["right"]
    assert outcomes(first) == ["right", "wrong", "undecided", "right"]
    assert first[2].reason.startswith("timeout after ")


async def test_time_in_which_the_machine_does_something_else_is_no_answers(config: Make, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    async with RewardPool(config("pool_rewards:stopped")) as pool:
        scoring = asyncio.create_task(pool.score(items("", answer=str(mark))))
        await until(lambda: mark.exists() and mark.read_text())
        worker = int(mark.read_text())
        os.kill(worker, signal.SIGSTOP)  # as if other processes had the processor
        await asyncio.sleep(1.2)  # four times what an answer may take
        os.kill(worker, signal.SIGCONT)
        assert outcomes(await scoring) == ["right"]
    assert len(mark.read_text().split()) == 1, "it was judged once"


def test_a_worker_is_replaced_before_what_its_reward_leaks_does_harm(config: Make) -> None:
    leaks = config("pool_rewards:leaks", workers=1, recycle_after=4)

    async def one_by_one(pool: RewardPool) -> list[Verdict]:
        return [verdict for _ in range(10) for verdict in await pool.score(items("", answer="4"))]

    async def together(pool: RewardPool) -> list[list[Verdict]]:
        return await asyncio.gather(*[pool.score(items("ok", "no")) for _ in range(6)])

    assert outcomes(scored(leaks, one_by_one)) == ["right"] * 10
    worn = config(workers=2, recycle_after=3)
    assert [outcomes(verdicts) for verdicts in scored(worn, together)] == [["right", "wrong"]] * 6


def test_hanging_answers_never_use_up_the_slots(config: Make) -> None:
    verdicts = scored(config(workers=2), lambda pool: pool.score(items(*["hang", "ok"] * 3)))
    assert outcomes(verdicts) == ["undecided", "right"] * 3


@pytest.mark.parametrize(("completion", "how"), [("exit", "exit status 3"), ("kill", "signal 9")])
def test_an_answer_that_kills_its_worker_twice_is_undecided(config: Make, completion: str, how: str) -> None:
    verdicts = scored(config(workers=2), lambda pool: pool.score(items("ok", completion, "no")))
    assert outcomes(verdicts) == ["right", "undecided", "wrong"]
    assert verdicts[1].reason == f"worker died: {how}"


def test_an_answer_whose_worker_died_by_accident_is_scored_again(config: Make, tmp_path: Path) -> None:
    mark = str(tmp_path / "mark")
    [verdict] = scored(config(), lambda pool: pool.score(items("once", answer=mark)))
    assert verdict.outcome is Outcome.WRONG


def test_what_a_reward_raises_or_returns_wrongly_is_undecided(config: Make, tmp_path: Path) -> None:
    log = tmp_path / "rewards.txt"
    verdicts = scored(config(), lambda pool: pool.score(items("leave", "none", "ok")), log=log)
    assert log.read_text() == "noise on stdout\n" * 3
    raised, returned, none = [verdict.reason for verdict in verdicts]
    assert re.fullmatch(r"the reward raised SystemExit in \S+pool_rewards\.py:\d+: 1", raised)
    place = r"\(\S+pool_rewards\.py:\d+\)"
    assert re.fullmatch(rf"the reward \S+:\w+ returned NoneType, not a number or a bool: None {place}", returned)
    assert not none


async def test_an_idle_worker_that_is_killed_comes_back(config: Make) -> None:
    async with RewardPool(config()) as pool:
        [child] = children()
        os.kill(child, signal.SIGKILL)
        for _ in range(2):
            assert outcomes(await pool.score(items("ok"))) == ["right"]


@pytest.mark.parametrize(
    ("written", "to", "how"),
    [
        ("ff" * 64, "", "something wrote into its replies"),
        ("00000005", "socket", "something wrote into its replies"),  # announces a frame of 80 MiB
        ("00000100", "socket", "did not reply for 1 s"),  # of 64 KiB: it may be a reply
    ],
)
def test_a_reward_that_writes_to_the_wire_is_undecided(config: Make, written: str, to: str, how: str) -> None:
    work = scored(config("pool_rewards:garbage"), lambda pool: pool.score(items(written, answer=to)), hung=1.0)
    assert [verdict.reason for verdict in work] == [f"worker died: {how}"]


def forged(request: int, verdicts: int) -> str:
    verdict = Verdict(outcome=Outcome.RIGHT, reward=1.0)
    return frame(Verdicts(request=request, verdicts=(verdict,) * verdicts, start=0.0, end=1.0)).hex()


@pytest.mark.parametrize(("request_id", "count"), [(1, 0), (1, 3), (7, 2)], ids=["empty", "too long", "of another"])
def test_a_reply_to_no_request_is_not_believed(config: Make, request_id: int, count: int) -> None:
    """Two completions in one chunk: the one that writes the reply is blamed, the other is judged."""
    work = scored(
        config("pool_rewards:garbage", patience=20.0),
        lambda pool: pool.score([*items(forged(request_id, count), answer="socket"), *items("", answer="nothing")]),
    )
    assert [verdict.reason for verdict in work] == ["worker died: something wrote into its replies", ""]
    assert outcomes(work) == ["undecided", "right"]


async def test_a_worker_that_hangs_is_replaced_while_it_waits_and_while_it_starts(config: Make) -> None:
    said: list[str] = []
    async with RewardPool(config(), hung=1.5, on_change=said.append) as pool:
        for _ in range(2):  # the second time, what takes its place may be starting yet
            [child] = children()
            os.kill(child, signal.SIGSTOP)
            while runs(child):
                await asyncio.sleep(0.02)
            while children() in ([], [child]):  # it has ended, and may not have been waited for yet
                await asyncio.sleep(0.001)
        assert outcomes(await pool.score(items("ok", "no"))) == ["right", "wrong"]
    assert {sentence.partition(" for ")[0] for sentence in said} == {"rewards-0 sent no heartbeat"}
    assert len(said) >= 2  # on a slow machine a heartbeat of the last one may be late, too


def test_a_reward_that_takes_too_much_memory_is_undecided(config: Make) -> None:
    [verdict] = scored(config("pool_rewards:greedy", memory_gib=0.5), lambda pool: pool.score(items("")))
    assert verdict.reason.startswith("the reward raised MemoryError in ")


def test_a_reward_that_floods_its_log_does_not_fill_the_disk(config: Make, tmp_path: Path) -> None:
    log = tmp_path / "rewards.txt"
    scored(config("pool_rewards:floods", timeout=20.0), lambda pool: pool.score(items("")), log=log)
    text = log.read_text()
    assert len(text) < 10 << 20
    assert text.endswith("[output cut after 4 MiB]\nlast None\n")


async def test_too_many_undecided_in_a_row_end_the_run(config: Make) -> None:
    async with RewardPool(config(max_consecutive_undecided=3)) as pool:
        await pool.score(items("none", "none", "ok", "none", "none"))
        with pytest.raises(RewardFunctionError, match=r"the last 3 completions were undecided.*NoneType"):
            await pool.score(items("none"))


async def test_slow_answers_are_shared_among_the_workers_and_spans_say_when_each_scored(config: Make) -> None:
    async with RewardPool(config(workers=2, timeout=5.0)) as pool:
        await pool.score(items(*["slow"] * 8))
        pool.drain_spans()
        before = time.monotonic()
        await pool.score(items(*["slow"] * 8))
        spans = pool.drain_spans()
        assert {(span.role, span.name) for span in spans} == {("rewards-0", "score"), ("rewards-1", "score")}
        assert all(before <= span.start <= span.end <= time.monotonic() for span in spans)
        assert pool.drain_spans() == []
        assert pool.busy_seconds >= 16 * 0.05


@pytest.mark.parametrize(
    ("function", "words"), [("finalanswer", "did you mean 'final_answer'"), ("broken_rewards:f", "nothing_of_the_kind")]
)
def test_a_reward_that_cannot_be_used_is_refused_before_the_run(config: Make, function: str, words: str) -> None:
    with pytest.raises(RewardFunctionError, match=words):
        run(check_reward(config(function)))
    assert children() == []


def test_a_worker_that_dies_or_hangs_while_starting_is_named(config: Make) -> None:
    with pytest.raises(RoleDied, match="rewards-0 ended while starting: exit status 7"):
        run(check_reward(config("dying_rewards:f")))
    with pytest.raises(DeadlineExceeded, match="rewards-0 to import stuck_rewards:f"):
        run(check_reward(config("stuck_rewards:f", start_timeout=0.3)))
    assert children() == []


@pytest.mark.parametrize(
    ("module", "error", "words"),
    [
        ("import os; os._exit(7)", RoleDied, "rewards-0 ended while starting: exit status 7"),
        ("import nothing_of_the_kind", RewardFunctionError, "nothing_of_the_kind"),  # as at the start
    ],
)
async def test_a_worker_that_cannot_be_brought_back_ends_the_run(
    config: Make, tmp_path: Path, module: str, error: type[Exception], words: str
) -> None:
    async with RewardPool(config()) as pool:
        (tmp_path / "pool_rewards.py").write_text(module)
        with pytest.raises(error, match=words):
            await pool.score(items("exit", "ok"))


async def test_a_worker_that_finds_no_room_here_ends_the_run(config: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    async with RewardPool(config(patience=5.0)) as pool:
        monkeypatch.setattr("sys.executable", "/nowhere/python")
        with pytest.raises(RoleDied, match=r"rewards-0 cannot be started: /nowhere/python: No such file"):
            await pool.score(items("exit", "ok"))
    assert "stretto-progress" not in Path("/proc/self/maps").read_text()


async def test_a_worker_for_which_there_is_no_room_for_a_moment_is_started_later(
    config: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = [errno.EAGAIN] * 3 + [errno.ENOMEM] * 3  # for longer than a worker that fails is tried again
    spawn = process._spawn

    def crowded(*arguments: Any) -> Any:
        if refused:
            raise OSError(number := refused.pop(), os.strerror(number))
        return spawn(*arguments)

    async with RewardPool(config(workers=1)) as pool:
        monkeypatch.setattr(process, "_spawn", crowded)
        assert (await pool.score(items("exit", "ok")))[1].outcome is Outcome.RIGHT
    assert refused == []


async def test_what_fails_behind_the_calls_fails_the_calls(config: Make, tmp_path: Path) -> None:
    """The worker's log cannot be opened any more: an error that no place of the pool expects."""
    (tmp_path / "logs").mkdir()
    async with RewardPool(config(patience=5.0), log=tmp_path / "logs" / "rewards.txt") as pool:
        shutil.rmtree(tmp_path / "logs")
        with pytest.raises(RoleDied, match=r"rewards-0 cannot be started: .*rewards\.txt: No such file"):
            await pool.score(items("exit", "ok"))


async def test_closing_leaves_no_process_and_answers_whoever_waits(config: Make) -> None:
    pool = RewardPool(config(workers=2, timeout=60))
    await pool.start()
    waiting = asyncio.create_task(pool.score(items("hang", "hang", "ok")))
    await asyncio.sleep(0.1)
    await pool.close()
    with pytest.raises(RoleDied, match="was closed"):
        await waiting
    with pytest.raises(RoleDied, match="was closed"):
        await pool.score(items("ok"))
    assert children() == []


def test_workers_die_with_the_process_that_started_them(config: Make) -> None:
    program = (
        "import asyncio, os\n"
        "from stretto.rewards.config import RewardsConfig\n"
        "from stretto.rewards.service.pool import RewardPool\n"
        "from stretto.rewards.service.wire import ScoreItem\n"
        "async def main():\n"
        "    pool = RewardPool(RewardsConfig(function='pool_rewards:reward', timeout=60))\n"
        "    await pool.start()\n"
        "    asyncio.ensure_future(pool.score([ScoreItem(prompt='', completion='hang', answer='')]))\n"
        "    await asyncio.sleep(0.1)\n"
        "    print(open(f'/proc/self/task/{os.getpid()}/children').read(), flush=True)\n"
        "    os.kill(os.getpid(), 9)\n"
        "asyncio.run(main())\n"
    )
    root = str(Path(__file__).parents[3])
    path = os.pathsep.join([root, os.environ["PYTHONPATH"]])
    done = subprocess.run([sys.executable, "-c", program], env=os.environ | {"PYTHONPATH": path}, capture_output=True)
    worker = int(done.stdout)
    until = time.monotonic() + 5
    while runs(worker):
        assert time.monotonic() < until, "the worker outlived its parent"
        time.sleep(0.01)
