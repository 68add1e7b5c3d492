"""One cache of built models for all system tests of a session, and one policy; plans for which no reward is tried."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from stretto.model.hf.build import build_policy
from stretto.rewards.built_in import BUILT_IN
from stretto.rewards.config import RewardsConfig
from stretto.rollout.questions import Question
from stretto_app.extensions.preflight import notes
from stretto_app.extensions.preflight.trial import try_reward
from stretto_verify.math import reward as _read_by_workers  # noqa: F401 - which have it, as copies of this process
from tests.launch.running import laboratory as laboratory
from tests.launch.warm import KNOWN, fork_workers
from tests.tiny_policy import SMALL


@pytest.fixture(scope="session")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder (`SMALL`) that no test changes."""
    folder = tmp_path_factory.mktemp("policy") / "tiny"
    build_policy(SMALL, folder, seed=1)
    return folder


@pytest.fixture(autouse=True)
def _forked_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rewards are tried, and gold answers read, by copies of this process."""
    fork_workers(monkeypatch)


@pytest.fixture
def untried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans are made without a trial of the rewards that stretto and tiny.toml have, which is a process each time."""

    def tried(config: RewardsConfig, questions: Sequence[Question], completions: int) -> list[str]:
        known = not config.functions and config.function in {KNOWN, *BUILT_IN}
        return [] if known else try_reward(config, questions, completions=completions)

    monkeypatch.setattr(notes, "try_reward", tried)
