"""Built-in reward ``code``: runs programs against tests in the sandbox of `stretto_verify`."""

from __future__ import annotations

from stretto.core.errors import Problem, RewardFunctionError
from stretto_verify.code.reward import CodeReward
from stretto_verify.sandbox.config import SandboxConfig
from stretto_verify.sandbox.probe import Report, probe
from stretto_verify.sandbox.walls import Walls
from stretto_verify.verdicts import SandboxRefused


def code_reward(settings: str) -> CodeReward:
    """Make the built-in reward ``code``; `settings` is a `SandboxConfig` as JSON. Probes the sandboxes of this machine.

    Raises:
        RewardFunctionError: this machine has no sandbox at the level that the settings require.
    """
    config = SandboxConfig.model_validate_json(settings)
    return CodeReward(config, *safe_walls(config))


def safe_walls(config: SandboxConfig) -> tuple[Walls, Report]:
    """Choose the sandbox with `stretto_verify`'s `probe`; returns its walls and the report of the choice. Errors name
    the section of the recipe.

    Raises:
        RewardFunctionError: this machine has no sandbox at the level that `config` requires.
    """
    try:
        return probe(config)
    except SandboxRefused as refusal:
        raise RewardFunctionError([Problem("rewards.code", refusal.found, refusal.remedy)]) from refusal
