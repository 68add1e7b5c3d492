"""Promise: games of textarena and environments behind OpenEnv, of the real packages, are worlds by the adapters of
examples/worlds: equal seeds and actions give equal episodes, and only what is new is told."""

import json
import socket
import subprocess
from pathlib import Path

import pytest

from benchmarks.peers.environment import Environment, PeerUnavailable
from tests.real_agents.running import PROGRAMS

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def episodes() -> dict[str, list[tuple[list[str], float]]]:
    """Of each package: the observations and the reward of three episodes, of seeds 7, 7 and 11."""
    try:
        python = Environment("worlds").ensure()
    except PeerUnavailable as problem:
        pytest.skip(f"they cannot be installed: {problem}")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    words = [str(python), str(PROGRAMS / "worlds.py"), str(ROOT), str(port)]
    told = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)
    assert told.returncode == 0, told.stderr[-3000:]
    return dict(json.loads(told.stdout.splitlines()[-1]))


@pytest.mark.parametrize("package", ["textarena", "openenv"])
def test_equal_seeds_and_actions_give_equal_episodes(
    episodes: dict[str, list[tuple[list[str], float]]], package: str
) -> None:
    first, again, other = episodes[package]
    assert first == again != other
    assert (first[1], other[1]) == (1.0, 1.0)


def test_an_environment_behind_openenv_lasts_its_episode(episodes: dict[str, list[tuple[list[str], float]]]) -> None:
    """The number of seed 7 is 8; halving guesses 10, 5, 7, 8."""
    hints = [f"The target number is {hint}." for hint in ("lower", "higher", "higher")]
    assert episodes["openenv"][0][0] == ["Guess a number from 1 to 20.", *hints]


def test_a_game_of_textarena_tells_what_is_new(episodes: dict[str, list[tuple[list[str], float]]]) -> None:
    told = episodes["textarena"][0][0]
    assert "You are playing Guess The Number." in told[0]
    assert all(one.startswith("[Player] [") and "[GAME]" in one for one in told[1:])
