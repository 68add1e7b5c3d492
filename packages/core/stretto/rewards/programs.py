"""Built-in reward ``code``: runs programs against tests in the sandbox of `stretto_verify`."""

from __future__ import annotations

from stretto.core.errors import Problem, RewardFunctionError
from stretto_verify.code.reward import CodeReward
from stretto_verify.sandbox.config import SandboxConfig
from stretto_verify.sandbox.probe import Report, probe
from stretto_verify.sandbox.walls import Walls
from stretto_verify.verdicts import SandboxRefused


def code_reward(settings: str) -> CodeReward:
    """The reward; `settings` is a `SandboxConfig` as JSON.

    Raises:
        RewardFunctionError: no sandbox that is safe enough can be made here.
    """
    config = SandboxConfig.model_validate_json(settings)
    return CodeReward(config, *safe_walls(config))


def safe_walls(config: SandboxConfig) -> tuple[Walls, Report]:
    """Same as `probe`, but errors name the section of the recipe.

    Raises:
        RewardFunctionError: no sandbox that is safe enough can be made here.
    """
    try:
        return probe(config)
    except SandboxRefused as refusal:
        raise RewardFunctionError([Problem("rewards.code", refusal.found, refusal.remedy)]) from refusal
