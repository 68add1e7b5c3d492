"""A reward is tried before a run.

Promises: one that never comes to a verdict (it raises, returns nothing, dies, takes too long) is refused with what was
seen, file and line or seconds and the key that allows more; a built-in that finds no gold answer right is refused, and
one of the user's own is told; one that judges one completion in two ways is named, with the question and both
verdicts; one that keeps to its word causes no sentence.
"""

import re
import time
from dataclasses import replace
from pathlib import Path

import pytest

from stretto.core.errors import RewardFunctionError
from stretto.rewards.config import RewardsConfig
from stretto.rollout.questions import Question
from stretto_app.extensions.preflight.trial import try_reward

QUESTIONS = [Question(id=str(at), text=f"{at}=", answer=str(at), place=f"rows.jsonl:{at}") for at in range(1, 7)]
MODULE = """
import os, time
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

def raising(prompt, completion, answer):
    return float(completion + " eggs") == float(answer)

def forgetful(prompt, completion, answer):
    completion == answer

def dying(prompt, completion, answer):
    os._exit(3)

def judge(prompt, completion, answer):
    time.sleep(0.4)
    return True

def busy(prompt, completion, answer):
    end = time.process_time() + 0.3
    while time.process_time() < end:
        pass
    return True

def hanging(prompt, completion, answer):
    time.sleep(60)

def once(prompt, completion, answer):
    if prompt == "1=":
        raise KeyError(prompt)
    return True

def graded(prompt, completion, answer, level, *, hint="none"):
    return (level, hint) == (3, "none")

def all_of_it(prompt, completion, answer, **fields):
    return fields == {"level": 3, "topic": "sums"}

def graded_to_ten(prompt, completion, answer):
    return 10.0 * (completion == answer)

def short(prompt, completion, answer):
    return len(completion) < 1
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "tried_rewards.py").write_text(MODULE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    return "tried_rewards"


@pytest.mark.parametrize(
    ("name", "settings", "words"),
    [
        ("raising", {}, ["in any of ", "rows.jsonl:", "ValueError in ", "tried_rewards.py:19: could not conv"]),
        ("forgetful", {}, ["the reward tried_rewards:forgetful returned NoneType, not a number or", "rewards.py:21"]),
        ("dying", {}, ["worker died: exit status 3"]),
        ("judge", {"timeout": 0.03}, ["' took ", " s by the clock", "may take 0.3 s", "rewards.timeout="]),
        ("busy", {"timeout": 0.1}, ["' took ", " s of processor time", "may take 0.1 s", "rewards.timeout="]),
        ("hanging", {"timeout": 0.1}, ["was not done after ", "may take 1 s", "rewards.timeout="]),
    ],
)
def test_a_reward_that_never_comes_to_a_verdict_is_refused_with_what_was_seen(
    module: str, name: str, settings: dict[str, float], words: list[str]
) -> None:
    config = RewardsConfig.model_validate({"function": f"{module}:{name}"} | settings)
    with pytest.raises(RewardFunctionError, match=r"rewards\.function") as caught:
        try_reward(config, QUESTIONS, patience={"judge": 0.7, "busy": 5}.get(name, 0.15))
    assert not [word for word in words if word not in str(caught.value)], str(caught.value)


def test_one_that_sometimes_comes_to_none_or_never_to_right_is_told(module: str) -> None:
    [lost, differing] = [*try_reward(RewardsConfig(function=f"{module}:once"), QUESTIONS), ""]
    assert "in one call, on the gold answer of rows.jsonl:1" in lost
    assert "KeyError in " in lost
    assert not differing
    [wrong] = try_reward(RewardsConfig(function=f"{module}:short"), QUESTIONS)
    assert "finds 4 of the first 4 gold answers wrong, judged as completions: '1' of rows.jsonl:1" in wrong


def test_one_of_another_range_is_told_what_counts_as_right(module: str) -> None:
    name = f"{module}:graded_to_ten"
    [told] = try_reward(RewardsConfig(function=name), QUESTIONS)
    assert f"the reward '{name}' gave 10; for accuracy and filters a completion is right above 0.5" in told
    assert try_reward(RewardsConfig(function=name, right=10.0), QUESTIONS) == []


@pytest.mark.parametrize("name", ["graded", "all_of_it"])
def test_a_reward_gets_the_fields_of_the_row_that_its_signature_takes(module: str, name: str) -> None:
    rows = [replace(question, fields='{"level": 3, "topic": "sums"}') for question in QUESTIONS]
    assert try_reward(RewardsConfig(function=f"{module}:{name}"), rows) == []
    if name == "graded":
        with pytest.raises(RewardFunctionError, match="the reward takes 'level', and the row has no further fields"):
            try_reward(RewardsConfig(function=f"{module}:{name}"), QUESTIONS)
        rows = [replace(question, fields='{"levl": 3}') for question in QUESTIONS]
        lacks = r"the reward takes 'level', and the row has the further fields 'levl'; did you mean 'levl'\?"
        with pytest.raises(RewardFunctionError, match=lacks):
            try_reward(RewardsConfig(function=f"{module}:{name}"), rows)


def test_one_that_waits_is_told_by_what_a_step_takes_and_its_trial_ends_in_time(module: str) -> None:
    config, start = RewardsConfig(function=f"{module}:judge", workers=2), time.monotonic()
    assert try_reward(config, QUESTIONS, patience=0.5) == [], "a run lets it wait for ten times its second"
    [told] = try_reward(config, QUESTIONS, patience=0.5, completions=64)
    assert re.search(
        r"took 0\.[4-9] s for a completion: the 64 of a step take \d+ s of 2 workers \(rewards\.work", told
    )
    with pytest.raises(RewardFunctionError, match=r"not done after 2\.\d s by the clock .* may take 1 s; .*timeout=1 "):
        try_reward(RewardsConfig(function=f"{module}:hanging", timeout=0.1), QUESTIONS, patience=2.0)
    assert time.monotonic() - start < 20


def test_a_built_in_that_does_not_fit_the_gold_answers_is_refused() -> None:
    gsm8k = "48/2 = <<48/2=24>>24 clips in May\n48+24 = <<48+24=72>>72 clips\n#### 72"
    rows = [Question(id="1", text="How many?", answer=gsm8k, place="rows.jsonl:1")]
    with pytest.raises(RewardFunctionError, match=r"'final_answer' finds 1 of the first 1 gold answers wrong.*#### 72"):
        try_reward(RewardsConfig(function="final_answer"), rows)
    [some] = try_reward(RewardsConfig(function="final_answer"), [*rows, *QUESTIONS])
    assert "finds 1 of the first 7 gold answers wrong" in some
    for fitting in ("last_number", "math", "exact_match"):
        assert try_reward(RewardsConfig(function=fitting), rows) == []


def test_a_reward_that_changes_its_mind_is_told_by_name(module: str) -> None:
    assert try_reward(RewardsConfig(function=f"{module}:fickle"), QUESTIONS) == [
        "the reward 'tried_rewards:fickle' judges one completion of rows.jsonl:2 in two ways: "
        "right (1), then wrong (0.5)"
    ]
    [sentence] = try_reward(RewardsConfig(function=f"{module}:sometimes"), QUESTIONS)
    assert "rows.jsonl:3 in two ways: right (1), then the reward raised ValueError in " in sentence
    assert sentence.endswith("tried_rewards.py:15: no reply")


def test_a_reward_that_keeps_to_its_word_is_not(module: str) -> None:
    assert try_reward(RewardsConfig(function=f"{module}:steady"), QUESTIONS) == []
    assert try_reward(RewardsConfig(function="math"), QUESTIONS) == []
