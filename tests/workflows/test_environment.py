"""Promise: an environment of reset and step is played turn by turn: each observation is a message, each completion an
action behind exactly what was said before; rewards are by action, and a world that raises fails the trajectory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from stretto.core.errors import WorkflowError
from stretto.core.records import Outcome
from stretto.worlds.workflows.config import WorkflowConfig
from stretto_workflows.loading import load_workflow
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
