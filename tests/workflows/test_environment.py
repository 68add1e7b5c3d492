"""Promise: an environment of reset and step is played turn by turn: each observation is a message, each completion an
action behind exactly what was said before; rewards are by action, and a world that raises fails the trajectory."""

import asyncio
from pathlib import Path
from typing import Any, cast

import pytest

from stretto.core.errors import WorkflowError
from stretto.core.forest import Tokens
from stretto.core.records import Outcome, Trajectory
from stretto.rollout.workflow import QuestionDetails, WorkflowConfig
from stretto_workflows.built_in.environment import EnvironmentPlay
from stretto_workflows.conversation import Conversation
from stretto_workflows.exchange import Exchange
from stretto_workflows.loading import load_workflow
from stretto_workflows.orders import Orders
from stretto_workflows.pool import WorkflowGroups, WorkflowPool
from stretto_workflows.session import MemoryRecord, Session
from tests.rollout.test_controller import controller
from tests.store.make import judged
from tests.workflows.benches import PROMPT, Bench, MakeBench
from tests.workflows.test_built_in import TOKENIZER, played, spelling

WORLD = "tests.workflows.guessing:Guessing"


def playing(**settings: Any) -> WorkflowConfig:
    return WorkflowConfig(function="environment", settings={"make": WORLD, **settings})


def halving(prompt: str) -> str:
    """The number of seed 0 is 1: guesses 4, 2, 1."""
    return str(4 >> prompt.count("lower"))


def test_an_episode_is_one_conversation_of_its_own(tmp_path: Path) -> None:
    trajectory, asked = played(playing(instructions="Play."), halving, tmp_path)
    assert trajectory.verdict.reward == pytest.approx(1.0 - 0.25 - 0.25)
    assert trajectory.verdict.rewards == {"actions": 3.0}
    sampled = [one for one in trajectory.segments if one.sampled]
    assert [TOKENIZER.decode(one.token_ids) for one in sampled] == ["4", "2", "1"]
    assert [one.reward for one in sampled] == [-0.25, -0.25, 1.0]
    assert asked[2][: len(asked[1])] == asked[1]  # the next prompt goes on behind the tokens held
    told = spelling(trajectory, len(trajectory.segments) - 1)
    assert told.startswith("<|im_start|>system\nPlay.<|im_end|>\n<|im_start|>user\nGuess a number from 1 to 8.")
    assert [one.cause for one in trajectory.segments if one.cause] == ["environment"]


def test_an_episode_ends_by_its_world_or_by_its_turns(tmp_path: Path) -> None:
    lost, asked = played(playing(arguments={"tries": 2}), lambda prompt: "8", tmp_path)
    assert (lost.verdict.reward, len(asked)) == (-0.5, 2)
    short, asked = played(playing(turns=1), lambda prompt: "8", tmp_path)
    assert (short.verdict.reward, len(asked)) == (-0.25, 1)


def test_a_world_that_raises_fails_the_trajectory_with_its_reason(tmp_path: Path) -> None:
    failed, _ = played(playing(arguments={"broken": True}), lambda prompt: "8", tmp_path)
    assert failed.verdict.outcome is Outcome.UNDECIDED
    assert "the world has ended" in failed.verdict.reason


def test_a_world_that_is_not_there_is_refused_before_the_run() -> None:
    with pytest.raises(WorkflowError, match="no_such_module"):
        load_workflow("environment", '{"make": "no_such_module:World"}')


class Worker:
    """In place of a pool: plays each episode until its first observation, and keeps it."""

    def __init__(self) -> None:
        self.begun: list[tuple[int, str]] = []  # seed of the trajectory, the number to be guessed

    async def run(self, exchange: Exchange) -> Trajectory:
        world = Shown()
        workflow = EnvironmentPlay("tests.workflows.test_environment:Shown")
        workflow._make = lambda: world
        with pytest.raises(Looked):
            await workflow.run(exchange.task, Conversation(cast(Orders, None), exchange.task))
        self.begun.append((exchange.task.seed, world.shown))
        return judged(exchange.session.id, 0.0)


class Looked(Exception):
    pass


class Shown:
    shown = ""

    def reset(self, seed: int) -> str:
        self.shown = str(seed)
        raise Looked

    def step(self, action: str) -> tuple[str, float, bool]:
        raise AssertionError(f"no completion is asked for, and {action!r} has come")

    def close(self) -> None:
        """Nothing is left."""


def groups_of(worker: Worker, bench: Bench) -> WorkflowGroups:
    def open_session(id: str, tokens: Tokens, seed: int) -> Session:
        return Session(id, tokens, seed, bench.model.sampler(MemoryRecord()), MemoryRecord())

    return WorkflowGroups(cast(WorkflowPool, worker), open_session, QuestionDetails(), bench.services)


async def test_the_trajectories_of_a_group_play_one_episode_and_other_groups_another(bench: MakeBench) -> None:
    worker, (control, _) = Worker(), controller(batch_size=2, group_size=3)
    groups = groups_of(worker, bench("Asks"))
    for _ in range(2):
        ticket = control.admit()
        assert ticket is not None
        await groups(ticket)
    seeds, shown = zip(*worker.begun, strict=True)
    assert len(set(seeds)) == 6
    assert [len(set(part)) for part in (shown[:3], shown[3:], shown)] == [1, 1, 2]


def test_an_evaluation_plays_the_episode_of_its_own_seed(bench: MakeBench) -> None:
    worker = Worker()
    asyncio.run(groups_of(worker, bench("Asks")).member("evaluation..17/0", PROMPT, 0, 41))
    assert worker.begun == [(41, "41")]
