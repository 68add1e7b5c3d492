"""A reward is tried before a run.

Promises: one that judges the same answer in two ways is told by name, with the question and both verdicts; one that
keeps to its word, and those that come with stretto, cause no sentence.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from stretto.launch.preflight.trial import differing_verdicts
from stretto.rewards.config import RewardsConfig
from stretto.worlds.data.task import Question

QUESTIONS = [Question(id=str(at), text=f"{at}=", answer=str(at), place=f"rows.jsonl:{at}") for at in range(1, 7)]
MODULE = """
calls = []

def steady(prompt, completion, answer):
    return completion == answer

def fickle(prompt, completion, answer):
    calls.append(prompt)
    return 0.5 if prompt == "2=" and calls.count(prompt) == 2 else 1.0

def sometimes(prompt, completion, answer):
    calls.append(prompt)
    if prompt == "3=" and calls.count(prompt) == 2:
        raise ValueError("no reply")
    return True
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "tried_rewards.py").write_text(MODULE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    return "tried_rewards"


def test_a_reward_that_changes_its_mind_is_told_by_name(module: str) -> None:
    assert differing_verdicts(RewardsConfig(function=f"{module}:fickle"), QUESTIONS) == [
        "the reward 'tried_rewards:fickle' judges the same answer to rows.jsonl:2 in two ways: "
        "right (1), then wrong (0.5)"
    ]
    [sentence] = differing_verdicts(RewardsConfig(function=f"{module}:sometimes"), QUESTIONS)
    assert sentence.endswith("rows.jsonl:3 in two ways: right (1), then the reward raised ValueError: no reply")


def test_a_reward_that_keeps_to_its_word_is_not(module: str) -> None:
    assert differing_verdicts(RewardsConfig(function=f"{module}:steady"), QUESTIONS) == []
    assert differing_verdicts(RewardsConfig(function="math"), QUESTIONS) == []
