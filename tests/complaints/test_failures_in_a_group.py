"""What users suffered: a completion whose generation or judging failed counts as one that earned 0, or stays in its
group's baseline (NeMo-RL#3589, NeMo-RL#2207, NeMo-Gym#2750, NeMo-Gym#3351, SkyRL#1613).

Promise: whichever and however many members of a group fail, in the engine, at a judge or in the reward, the advantages
of the others are, to the last bit, those of a group that never had more members."""

import asyncio
import json
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from stretto.core.errors import RefusedRequest
from stretto.core.forest import Tokens, TurnRequest
from stretto.core.records import (
    Batch,
    Completion,
    GenerateRequest,
    Outcome,
    Prompt,
    Sampling,
    Segment,
    StopReason,
    Trajectory,
    trajectory_id,
)
from stretto.rewards.config import RewardPart, RewardsConfig
from stretto.rewards.service.pool import RewardPool
from stretto.rewards.service.wire import ScoreItem
from stretto.rollout.controller import Ticket
from stretto.rollout.single_turn import SingleTurn
from stretto.rollout.workflow import QuestionDetails, WorkflowConfig
from stretto.trainer.batch.samples import samples_of
from stretto.trainer.objective.algorithm import AlgorithmConfig
from stretto_workflows.exchange import Services
from stretto_workflows.pool import WorkflowGroups, WorkflowPool
from stretto_workflows.rendering import PlainRendering
from stretto_workflows.session import MemoryRecord, Session
from tests.rewards.replying import serving
from tests.rollout.test_controller import answers, controller
from tests.trainer.test_estimators import FIRST_OF_EACH
from tests.workflows.benches import decode, encode, score, verdict

MEMBERS = 8
OTHER = [1.0, *[0.0] * (MEMBERS - 1)]  # the rewards of another group of the batch, of which no member fails
_REWARD = """
def reward(prompt, completion, answer):
    if completion == "raises":
        raise RuntimeError("the grader is down")
    if completion == "says nothing":
        return None
    while completion == "hangs":
        pass
    return float(completion)

def form(prompt, completion, answer):
    return 0.0
"""

Rewards = Sequence[float | None]  # None for a member that fails
#: Groups of which one member fails, two, and so on.
GROUPS: list[Rewards] = []
for _failing in range(1, MEMBERS):
    _chance = random.Random(_failing)
    _where = _chance.sample(range(MEMBERS), _failing)
    GROUPS.append([None if member in _where else _chance.choice((0.0, 1.0, 0.1, 0.7)) for member in range(MEMBERS)])


def trained(made: Callable[[Ticket], Sequence[Trajectory]]) -> Batch:
    """The batch of a group whose trajectories are made for its ticket, and of one of which no member fails."""
    control, _ = controller(batch_size=2, group_size=MEMBERS)
    for trajectories in (made, lambda ticket: answers(ticket, OTHER)):
        ticket = control.admit()
        assert ticket is not None
        control.finish(ticket, trajectories(ticket))
    batch = control.take()
    assert batch is not None
    return batch


def _given(trajectories: Sequence[Trajectory], ticket: Ticket) -> Sequence[Trajectory]:
    """As they are, whatever the ticket."""
    return trajectories


def advantages(estimator: str, batch: Batch) -> list[tuple[float, ...]]:
    config = AlgorithmConfig.model_validate({"advantages": estimator})
    return [tuple(sample.advantages) for sample in samples_of(batch, config, longest=8).samples]


# Where a member fails. Each makes the trajectories of a group for its ticket.

Stage = Callable[[Rewards], Callable[[Ticket], Awaitable[Sequence[Trajectory]]]]


def judged_by(pool: RewardPool, failed: Sequence[str]) -> Stage:
    """Completions that are texts of their rewards, or of what `failed` has for those that fail."""

    def stage(rewards: Rewards) -> Callable[[Ticket], Awaitable[Sequence[Trajectory]]]:
        texts = [failed[at % len(failed)] if one is None else str(one) for at, one in enumerate(rewards)]

        async def generate(request: GenerateRequest) -> AsyncIterator[Completion]:
            for member, _ in enumerate(request.seeds):
                yield Completion(
                    request.id,
                    member,
                    Segment.of(
                        token_ids=(member,), behavior_logprobs=(-0.1,), versions=(0,), stop_reason=StopReason.STOP
                    ),
                )

        return SingleTurn(generate, pool.score_group, lambda ids: texts[ids[0]], Sampling(max_tokens=4))

    return stage


def generated_by(pool: WorkflowPool, config: WorkflowConfig) -> Stage:
    """Conversations of two turns. Of a member that fails the first turn is refused, or the second one."""
    services = Services(score, decode, PlainRendering(encode), None, Sampling(max_tokens=4), 40, verdict, config)

    def stage(rewards: Rewards) -> Callable[[Ticket], Awaitable[Sequence[Trajectory]]]:
        def open_session(id: str, tokens: Tokens, seed: int) -> Session:
            member, record, turns = int(id.rpartition("/")[2]), MemoryRecord(), list[TurnRequest]()

            async def sample(request: TurnRequest) -> Segment:
                turns.append(request)
                if rewards[member] is None and len(turns) == 1 + member % 2:
                    raise RefusedRequest("prompt_token_ids", "9,999 tokens", "at most 4,096")
                said = Segment.of((1, 2), (-0.5, -0.5), (0, 0), stop_reason=StopReason.STOP)
                record.journal(request.node, said)
                return said

            return Session(id, tokens, seed, sample, record, record.segments, record.calls)

        groups = WorkflowGroups(pool, open_session, QuestionDetails(), services)
        prompt = Prompt("17", encode("3+4="), "3+4=", json.dumps(rewards))

        async def made(ticket: Ticket) -> Sequence[Trajectory]:
            ids = [trajectory_id(ticket.group_id, member) for member in ticket.members]
            members = enumerate(ticket.seeds)
            return await asyncio.gather(
                *(groups.member(id, prompt, *one) for id, one in zip(ids, members, strict=True))
            )

        return made

    return stage


async def of_all_groups(stage: Stage) -> list[Sequence[Trajectory]]:
    """The trajectories of each of `GROUPS`."""
    found = []
    for rewards in GROUPS:
        ticket = controller(batch_size=2, group_size=MEMBERS)[0].admit()
        assert ticket is not None
        found.append(await stage(rewards)(ticket))
    return found


async def failed_at_generation(folder: Path) -> list[Sequence[Trajectory]]:
    config = WorkflowConfig(function="failing_workflow:TwoTurns", path=str(Path(__file__).parent), max_failed=1.0)
    async with WorkflowPool(config, folder / "workflow.txt") as pool:
        return await of_all_groups(generated_by(pool, config))


async def failed_at_the_judge(folder: Path) -> list[Sequence[Trajectory]]:
    def reply(question: Mapping[str, Any], said: str) -> bytes:
        asked = question["messages"][0]["content"]
        content = f"Score: {asked}" if asked[0].isdigit() else "I cannot say"
        choice = {"message": {"content": content}, "finish_reason": "stop"}
        return b"no JSON" if asked == "breaks" else json.dumps({"choices": [choice]}).encode()

    with serving(reply, (200, "")) as server:
        judge = {"address": f"{server.address}/v1", "model": "m", "tries": 1, "prompt": "{completion}", "full": 1}
        settings = {"function": "judge", "judge": judge, "max_consecutive_undecided": 100}
        async with RewardPool(RewardsConfig.model_validate(settings)) as pool:
            return await of_all_groups(judged_by(pool, ("says nothing", "breaks")))


async def failed_in_the_reward(folder: Path) -> list[Sequence[Trajectory]]:
    (folder / "grader_of_groups.py").write_text(_REWARD)
    settings = {"function": "grader_of_groups:reward", "path": str(folder), "max_consecutive_undecided": 100}
    async with RewardPool(RewardsConfig.model_validate(settings)) as pool:
        return await of_all_groups(judged_by(pool, ("raises", "says nothing")))


@pytest.mark.parametrize("failed", [failed_at_generation, failed_at_the_judge, failed_in_the_reward])
def test_the_others_have_the_advantages_of_a_smaller_group_to_the_last_bit(
    failed: Callable[[Path], Awaitable[list[Sequence[Trajectory]]]], tmp_path: Path
) -> None:
    made = asyncio.run(asyncio.wait_for(failed(tmp_path), 60))
    for number, (rewards, trajectories) in enumerate(zip(GROUPS, made, strict=True), start=1):
        assert [one.verdict.reward for one in trajectories] == rewards
        assert [one.verdict.outcome for one in trajectories].count(Outcome.UNDECIDED) == number
        batch = trained(partial(_given, trajectories))
        alone = [one for one in trajectories if one.verdict.reward is not None]
        never_more = trained(partial(_given, alone))
        assert len(batch.groups[0].trajectories) == MEMBERS - number
        for estimator in FIRST_OF_EACH:
            assert advantages(estimator, batch) == advantages(estimator, never_more) != [], (estimator, number)


def test_a_grader_that_raises_hangs_or_says_nothing_earns_no_zero(tmp_path: Path) -> None:
    """Of one reward, and of several of which one fails."""
    (tmp_path / "grader_of_complaints.py").write_text(_REWARD)
    grader = "grader_of_complaints:reward"
    several = tuple(RewardPart(function=f"grader_of_complaints:{name}") for name in ("form", "reward"))
    settings: dict[str, Any] = {"path": str(tmp_path), "timeout": 0.5, "max_consecutive_undecided": 100}
    texts = ["1.0", "raises", "0.0", "hangs", "says nothing", "0.25"]
    items = [ScoreItem(prompt="", completion=text, answer="") for text in texts]

    async def judged(config: RewardsConfig) -> list[tuple[Outcome, float | None]]:
        async with RewardPool(config) as pool:
            return [(verdict.outcome, verdict.reward) for verdict in await pool.score(items)]

    for config in (RewardsConfig(function=grader, **settings), RewardsConfig(functions=several, **settings)):
        found = asyncio.run(asyncio.wait_for(judged(config), 60))
        assert [reward for _, reward in found] == [1.0, None, 0.0, None, None, 0.25]
        assert [outcome for outcome, _ in found].count(Outcome.UNDECIDED) == 3
        rewards = [reward for _, reward in found]
        batch = trained(lambda ticket, given=rewards: answers(ticket, [*given, None, None]))  # type: ignore[misc]
        assert [len(group.trajectories) for group in batch.groups] == [3, MEMBERS]
        centred = [one[0] for one in advantages("group_mean", batch)[:3]]
        assert centred == pytest.approx([1.0 - 1.25 / 3, -1.25 / 3, 0.25 - 1.25 / 3])
