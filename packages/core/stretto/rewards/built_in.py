"""Table of the built-in rewards: module and time limit of each.

It holds names only: a worker imports the one module that it needs, the conductor none.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

_ANSWER_SECONDS = 1.0


@dataclass(frozen=True)
class _BuiltIn:
    """A built-in reward: its ``package.module:function``, and its hard limit for one completion in CPU seconds.

    `gold`: ``package.module:function`` of a function, called like a reward, that checks each gold answer when the data
    is loaded; "": none. It raises `Undecided` for one that no completion could match. `configured`: `function` is a
    factory; it gets the section of the recipe that has the reward's name, as JSON, and returns the reward.
    """

    function: str
    timeout: float = _ANSWER_SECONDS
    gold: str = ""
    configured: bool = False


BUILT_IN: Mapping[str, _BuiltIn] = {
    "code": _BuiltIn(
        "stretto_verify.code.reward:code_reward",
        timeout=30.0,
        gold="stretto_verify.code.formats:gold",
        configured=True,
    ),
    "exact_match": _BuiltIn("stretto.rewards.functions:exact_match"),
    "final_answer": _BuiltIn("stretto.rewards.functions:final_answer"),
    "judge": _BuiltIn("stretto_verify.models:judge_reward", timeout=60.0, configured=True),
    "last_number": _BuiltIn("stretto.rewards.functions:last_number", gold="stretto.rewards.functions:number_gold"),
    "reasoning_gym": _BuiltIn(
        "stretto_verify.reasoning:reasoning_gym", timeout=120.0, gold="stretto_verify.reasoning:gold"
    ),
    "reward_model": _BuiltIn("stretto_verify.models:reward_model", timeout=60.0, configured=True),
    "math": _BuiltIn("stretto_verify.math.reward:math", gold="stretto_verify.math.reward:gold"),
}


def timeout_of(function: str) -> float:
    """Default time limit for one completion, in CPU seconds: the own limit of the built-in with this name, otherwise
    one second."""
    return BUILT_IN[function].timeout if function in BUILT_IN else _ANSWER_SECONDS
