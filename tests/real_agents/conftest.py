"""The environment of the agents, made once in the user's cache (`benchmarks.peers.environment`)."""

from pathlib import Path

import pytest

from benchmarks.peers.environment import Environment, PeerUnavailable

#: Run under other interpreters.
collect_ignore = ["programs"]


@pytest.fixture(scope="session")
def agents() -> Path:
    """The interpreter under which the agents run. Where they cannot be installed, their tests are skipped."""
    try:
        return Environment("agents").ensure()
    except PeerUnavailable as problem:
        pytest.skip(f"the agents cannot be installed: {problem}")
