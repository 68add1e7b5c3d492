"""How the conductor judges engines between canaries, and what becomes of those it distrusts, on a clock that jumps.

- The first proof of a make is the measure of its later ones, within limits of the type, also behind a resume; the worst
  of a run is kept.
- The limit is that of the coarser type of engine and trainer: an honest run of mixed types is left alone.
- A mixture of experts may be three times as far away in half precision; in float32 one token of it may jump.
- Few tokens of many steps count as much as many tokens of one.
- An engine that nothing was compared of for two versions is asked to compute tokens of its own again; so is one that is
  doubted, at every version. One that the trainer compares is never asked.
- An engine that disagrees twice in a few judgements is replaced, whoever judges. Where its replacement does the same,
  the run ends with its name; a guest leaves instead, and the run goes on.
- An engine that does not prove a version is replaced at the last evaluation too; whenever it has proven one in between,
  again. One that says another version has not proven this one.
- A machine that pulls a version while the trainer publishes many proves it; one that is too old is refused, and nobody
  waits for its canary. A machine that never catches up is named.
"""

import asyncio
import random
from collections.abc import Callable, Coroutine, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import msgspec
import pytest

from stretto.core.canary import Agreement, Ask, Canary, Challenge, Loaded, Proof, Scores
from stretto.core.errors import UnprovenWeights, WireError
from stretto.engine.config import EngineConfig
from stretto.engine.wire import EngineSpec
from stretto.loop.config import DeadlinesConfig
from stretto.loop.engines.handle import EngineHandle
from stretto.loop.engines.pool import EnginePool
from stretto.loop.engines.proving import ITSELF, THE_TRAINER, Proving
from stretto.processes.supervisor import RestartBudget
from tests.asynchronous import Test, run_by
from tests.faults.simulation import VirtualLoop
from tests.loop.simulated_guests import Machine, SimulatedClient, SimulatedProcess

NAME = "engine-0"
LOGPROBS = tuple(-0.5 - place / 10 for place in range(63))
DEADLINES = DeadlinesConfig(start=60.0, answer=100.0, load=60.0, hung=8.0, engine_restarts=10)


class Prover(SimulatedClient):
    """An engine whose weights are `off` nats away from the published ones and whose sampled tokens are told `lies` nats
    too low."""

    off = lies = pulls = 0.0  # the last: seconds in which its machine pulls a version
    ahead = 0  # versions by which the one that it says it has is newer

    def __init__(self, name: str, machine: Machine) -> None:
        super().__init__(name, machine, lambda name, request, version: None)
        self.asked: list[int] = []

    async def score(self, texts: Sequence[Sequence[int]]) -> list[tuple[float, ...]]:
        raise AssertionError("nobody asks for scores here")

    async def update(self, version: int, ask: Ask | None = None) -> Loaded:
        await asyncio.sleep(self.pulls)
        challenge = await ask(version) if ask is not None else None
        loaded = await super().update(version)
        scores = None if challenge is None else self._scores(challenge)
        return msgspec.structs.replace(loaded, version=loaded.version + self.ahead, scores=scores)

    def _scores(self, challenge: Challenge) -> Scores:
        self.asked.append(challenge.sampled)
        sampled = tuple((-1.0 - self.lies, -1.0) for _ in range(challenge.sampled))
        return Scores(tuple(x + self.off for x in challenge.canary.logprobs), sampled=sampled)


class Run:
    """A pool with one engine, its own or a guest, and a trainer that publishes."""

    def __init__(
        self, *, guest: bool = False, dtype: str = "float32", trainer: str = "float32", routed: bool = False
    ) -> None:
        self.said: list[str] = []
        self.trainer, self.routed = trainer, routed
        config = EngineConfig.model_validate({"dtype": dtype}).model_dump_json()
        spec = EngineSpec(NAME, "unix:/nowhere", "", "", "", config, 1, 0.0)
        specs, say = [] if guest else [spec], self.said.append
        self.pool = EnginePool(specs, Path("/dev/null"), DEADLINES, proving=Proving(), say=say)
        self.proving = self.pool.proving
        self.proving.expect(self.said.append)
        machine = Machine(random.Random(1), pull_seconds=0.0)
        self.client, self.version = Prover(NAME, machine), 0
        self.process = SimulatedProcess(machine, lambda: self.version, self.client)
        budget = RestartBudget(DEADLINES.engine_restarts, 1.0)
        handle = EngineHandle(spec, self.process, self.client, DEADLINES, budget, self.pool.changed, self.proving)
        self.publish(0)
        self.handle, self.guest = handle, guest
        if not guest:
            self.pool._engines[NAME] = handle

    def publish(self, version: int) -> None:
        self.version = version
        canary = Canary(version, tuple(range(64)), LOGPROBS, depth=2, dtype=self.trainer, routed=self.routed)
        self.proving.published(canary)
        self.pool.publish(version)

    async def steps(self, number: int, *agreement: tuple[int, float]) -> None:
        """The trainer takes so many steps, and compares tokens with an error in each."""
        for _ in range(number):
            self.publish(self.version + 1)
            await asyncio.sleep(10.0)  # it loads; a process starts in 3 seconds
            self.proving.agreed([Agreement(NAME, tokens, error) for tokens, error in agreement])

    @property
    def replaced(self) -> int:
        return self.process.starts - 1


def play(run: Run, work: Callable[[Run], Coroutine[Any, Any, None]]) -> None:
    async def main() -> None:
        if run.guest:
            run.pool.join(run.handle)
        else:
            await run.pool.start(0)
        watching = [asyncio.create_task(one) for one in (run.pool.supervise(), run.pool.keep_loaded())]
        working = asyncio.create_task(work(run))
        try:
            done, _ = await asyncio.wait({*watching, working}, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in (*watching, working):
                task.cancel()
            await asyncio.gather(*watching, working, return_exceptions=True)
            await run.pool.stop(0.0)

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(asyncio.wait_for(main(), 10_000))


def playing(**settings: Any) -> Callable[[Test], Callable[..., None]]:
    """For a test in a run with these settings."""
    return run_by(lambda work: play(Run(**settings), work))


@pytest.mark.parametrize(
    ("dtype", "measured", "allowed"),
    [("float32", 1, 48), ("float32", 9, 54), ("float32", 60, 64), ("bfloat16", 0.4, 2.4), ("bfloat16", 2.5, 3)],
)
def test_the_first_proof_of_a_make_is_the_measure_of_its_later_ones(
    dtype: str, measured: float, allowed: float
) -> None:
    """In units of rounding."""
    run, resumed = Run(dtype=dtype), Run(dtype=dtype)
    unit = run.proving._canaries[0].unit(dtype)
    run.client.off = measured * unit

    async def work(run: Run) -> None:
        for off in (0.99 * allowed, measured):
            run.client.off = off * unit
            await run.steps(1)

    play(run, work)
    (worst,), (newest,) = run.proving.record.worst, run.proving.record.newest
    assert (run.said, worst.version, newest.version) == ([], 1, 2)
    resumed.proving.restore(run.proving.record)
    assert resumed.proving.record == run.proving.record
    resumed.client.off = 1.01 * allowed * unit
    with pytest.raises(UnprovenWeights, match="has not proven version 0"):
        play(resumed, work)


@pytest.mark.parametrize(("engine", "trainer"), [("float32", "bfloat16"), ("bfloat16", "float32")])
def test_an_honest_run_of_mixed_types_is_left_alone(engine: str, trainer: str) -> None:
    run = Run(dtype=engine, trainer=trainer)
    run.client.off = 0.01  # of bfloat16's rounding

    async def work(run: Run) -> None:
        await run.steps(5, (500, 0.02))
        assert run.said == []
        run.client.off = 0.1
        await run.steps(2)

    with pytest.raises(UnprovenWeights, match="has not proven version 6"):  # the canary sees what is beyond
        play(run, work)


@pytest.mark.parametrize("version", [0, 1])
def test_the_trainers_type_counts_in_the_tolerance_of_a_float32_engine(version: int) -> None:
    run, off = Run(trainer="bfloat16"), 0.5  # less than 64 units of bfloat16
    run.client.off = 0.0 if version else off

    async def work(run: Run) -> None:
        run.client.off = off
        await run.steps(2)

    with pytest.raises(UnprovenWeights, match=f"has not proven version {version}"):
        play(run, work)


def test_an_engine_that_says_another_version_has_not_proven_this_one() -> None:
    async def work(run: Run) -> None:
        run.client.ahead = 1
        await run.steps(2)

    with pytest.raises(UnprovenWeights, match=r"has not proven version 1: .*it says that it has version 2"):
        play(Run(), work)


@playing()
async def test_an_engine_that_proves_versions_again_may_be_replaced_again(run: Run) -> None:
    begins = run.client.begins

    def honest(version: int) -> None:
        begins(version)
        run.client.off = 0.0

    run.client.begins = honest  # type: ignore[method-assign]
    for replaced in (1, 2):
        await run.steps(1)
        run.client.off = 0.01
        await run.steps(2)
        assert run.replaced == replaced


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_limit_of_a_mixture_in_half_precision_is_wider(dtype: str) -> None:
    """An honest one is up to 0.13 nats away, where rounding chooses other experts."""

    async def honest(run: Run) -> None:
        await run.steps(5, (32, 0.13))
        assert run.said == []
        await run.steps(2, (32, 0.35))
        assert f"{NAME} differs from the trainer by 0.35 nats a token, 0.3 allowed: it is replaced" in run.said

    async def apart(dense: Run) -> None:
        await dense.steps(2, (32, 0.13))
        assert f"{NAME} differs from the trainer by 0.13 nats a token, 0.1 allowed: it is replaced" in dense.said

    play(Run(dtype=dtype, routed=True), honest)
    play(Run(dtype=dtype), apart)


@playing(routed=True)
async def test_in_float32_one_token_of_a_mixture_may_jump(run: Run) -> None:
    await run.steps(5, (32, 1.74 / 32))  # the farthest jump on record, logprob-distribution.json
    assert run.said == []
    await run.steps(2, (1800, 0.003))
    assert f"{NAME} differs from the trainer by 0.003 nats a token, 0.002 allowed: it is replaced" in run.said


@playing()
async def test_few_tokens_of_many_steps_count_as_much_as_many_of_one(run: Run) -> None:
    await run.steps(3, (10, 0.01))
    assert run.said == [], "30 tokens are too few"
    await run.steps(1, (10, 0.01))
    assert run.said == [f"{NAME} differs from the trainer by 0.01 nats a token, 0.001 allowed"]
    await run.steps(5, (10, 0.01))
    assert f"{NAME} differs from the trainer by 0.01 nats a token, 0.001 allowed: it is replaced" in run.said
    assert run.replaced == 1


@playing()
async def test_an_engine_that_nothing_is_compared_of_computes_its_own_tokens_again(run: Run) -> None:
    await run.steps(9)
    asked = [tokens > 0 for tokens in run.client.asked]
    assert asked == [False, False, True, False, True, False, True, False, True, False]
    assert run.said == []


@playing()
async def test_an_engine_that_the_trainer_compares_is_never_asked(run: Run) -> None:
    await run.steps(9, (40, 1e-6))
    assert not any(run.client.asked)


@pytest.mark.parametrize(
    ("compared", "judge"), [((), "its own forward"), (((40, 0.01),), "the trainer")], ids=["alone", "compared"]
)
def test_a_sampler_that_tells_other_logprobs_ends_the_run(compared: tuple[tuple[int, float], ...], judge: str) -> None:
    run = Run()
    run.client.lies = 0.01

    async def work(run: Run) -> None:
        await run.steps(20, *compared)
        raise AssertionError("the run goes on")

    with pytest.raises(UnprovenWeights, match=rf"{NAME}: differs from {judge} by 0.01 nats a token, 0.001 allowed"):
        play(run, work)
    assert run.replaced == 1
    assert run.version <= 8


@playing()
async def test_a_sampler_that_lied_once_costs_a_replacement(run: Run) -> None:
    await run.steps(2, (40, 0.01))
    await run.steps(9, (40, 1e-6))
    await run.steps(2, (40, 0.01))
    await asyncio.sleep(10.0)
    assert run.replaced == 2, "it has agreed in between"


@pytest.mark.parametrize("judges", [(THE_TRAINER,), (THE_TRAINER, ITSELF)], ids=["one", "both"])
def test_an_engine_that_disagrees_every_second_time_is_replaced_and_then_ends_the_run(judges: tuple[str, ...]) -> None:
    async def work(run: Run) -> None:
        for step in range(20):
            await run.steps(1)
            error = 0.5 if step % 2 else 1e-6
            run.proving.agreed([Agreement(NAME, 40, error)], judges[step // 2 % len(judges)])
        raise AssertionError("the run goes on")

    run = Run()
    with pytest.raises(UnprovenWeights, match=f"{NAME}: differs from .* by 0.5 nats a token"):
        play(run, work)
    assert run.replaced == 1
    assert run.version <= 9


@pytest.mark.parametrize("wrong", ["off", "lies"])
@playing(guest=True)
async def test_a_guest_that_disagrees_leaves_and_the_run_goes_on(run: Run, wrong: str) -> None:
    await run.pool.until_up(60)
    setattr(run.client, wrong, 0.01)
    await run.steps(20)
    assert (run.pool.names, run.replaced) == ([], 1)
    assert f"{NAME} has left: {NAME}: " in run.said[-1]
    assert "0.01 nats" in run.said[-1]


@playing(guest=True)
async def test_a_version_that_a_machine_has_pulled_for_seven_steps_is_proven(run: Run) -> None:
    await run.pool.until_up(60)
    run.client.pulls = 75.0
    await run.steps(7)
    run.client.pulls = 0.0
    await run.steps(1)
    assert run.handle.version == run.version


@playing(guest=True)
async def test_a_machine_that_pulls_more_slowly_than_the_trainer_publishes_is_named_once(run: Run) -> None:
    run.client.pulls = 15.0
    await run.steps(20)
    slow = f"{NAME} loads a version in 15 s, and 1 newer one came meanwhile: no groups until it has caught up"
    assert run.said == [slow]
    run.client.pulls = 0.0
    await run.steps(2)
    assert run.said == [slow, f"{NAME} has joined, at version {run.version}"]


def test_a_version_whose_canary_is_gone_is_refused_at_once() -> None:
    run = Run()
    for version in range(40):
        run.publish(version)
    with pytest.raises(WireError, match=f"{NAME}: version 1 is too old to be proven"):
        asyncio.run(asyncio.wait_for(run.proving.load(run.handle.spec, run.client, 1), 5.0))


def test_a_canary_that_does_not_come_is_no_fault_of_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stretto.loop.engines.proving._CANARY_SECONDS", 0.1)
    run = Run()
    run.publish(0)
    with pytest.raises(WireError, match=r"waited 0\.1 s for the canary of version 1 for"):
        asyncio.run(asyncio.wait_for(run.proving.load(run.handle.spec, run.client, 1), 5.0))


@pytest.mark.parametrize("persists", [False, True])
def test_an_engine_that_does_not_prove_a_version_is_replaced_at_the_last_evaluation_too(persists: bool) -> None:
    async def work(run: Run) -> None:
        await run.steps(1)
        run.proving.published(Canary(2, tuple(range(64)), LOGPROBS, depth=2))
        run.version, run.client.off = 2, 0.01
        begins = run.client.begins

        def honest(version: int) -> None:
            begins(version)
            run.client.off = 0.01 if persists else 0.0

        run.client.begins = honest  # type: ignore[method-assign]
        await run.pool.reach(2)
        assert (run.replaced, run.pool.live) == (1, 2)

    ends = pytest.raises(UnprovenWeights, match=rf"{NAME}: has not proven version 2") if persists else nullcontext()
    with ends:
        play(Run(), work)


def test_the_versions_that_an_engine_has_proven_are_few_ranges_however_many_it_skips() -> None:
    proving = Proving()
    for version in range(0, 2_000, 2):  # a load takes two steps
        proving._note(Proof("engine-0", "native float32", version, 1e-6, 1e-4, 1e-7, True), "float32")
    (proven,) = proving.record.proven
    assert len(proven.ranges) == 64
    assert proven.ranges[0] == (0, 1_872)
    assert proven.ranges[1:] == tuple((version, version) for version in range(1_874, 2_000, 2))
