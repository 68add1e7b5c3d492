"""The environment of the tools, made once in the user's cache (`benchmarks.peers.environment`)."""

from pathlib import Path

import pytest

from benchmarks.peers.environment import Environment, PeerUnavailable

#: Run under another interpreter.
collect_ignore = ["programs"]


@pytest.fixture(scope="session")
def tools() -> Path:
    """The interpreter that has the tools. Where they cannot be installed, their tests are skipped."""
    try:
        return Environment("outlets").ensure()
    except PeerUnavailable as problem:
        pytest.skip(f"the tools cannot be installed: {problem}")
