"""One cache of built models for all system tests of a session; plans for which no reward is tried."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from stretto.launch.preflight import plan
from stretto.launch.preflight.trial import try_reward
from stretto.rewards.built_in import BUILT_IN
from stretto.rewards.config import RewardsConfig
from stretto.worlds.data.task import Question
from tests.launch.running import laboratory as laboratory
from tests.launch.warm import KNOWN


@pytest.fixture
def untried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans are made without a trial of the rewards that stretto and tiny.toml have, which is a process each time."""

    def tried(config: RewardsConfig, questions: Sequence[Question]) -> list[str]:
        known = not config.functions and config.function in {KNOWN, *BUILT_IN}
        return [] if known else try_reward(config, questions)

    monkeypatch.setattr(plan, "try_reward", tried)
