"""Environments behind an OpenEnv server, as worlds: ``pip install openenv``.

    [workflow]
    function = "environment"

    [workflow.settings]
    make = "openenv_world:Remote"                # this file, beside the recipe
    arguments = { url = "http://127.0.0.1:8000", action = "message", observation = "text" }

Each plain request ``/reset`` or ``/step`` to OpenEnv creates an environment. OpenEnv's client, used here, keeps one
environment for an episode.
"""

from __future__ import annotations

import json
from typing import Any

from openenv.core.generic_client import GenericEnvClient


class Remote:
    """One episode. `action`, `observation`: names of the fields that hold the texts."""

    def __init__(self, url: str, action: str, observation: str) -> None:
        self._action, self._observation = action, observation
        self._client = GenericEnvClient(base_url=url).sync()

    def reset(self, seed: int) -> str:
        """Begin an episode; return the first observation."""
        return self._text(self._client.reset(seed=seed % 2**31).observation)

    def step(self, action: str) -> tuple[str, float, bool]:
        """Take an action; return the next observation, its reward, and whether the episode has ended."""
        result = self._client.step({self._action: action})
        return self._text(result.observation), float(result.reward or 0.0), bool(result.done)

    def close(self) -> None:
        """End the session with the server."""
        self._client.close()

    def _text(self, observation: dict[str, Any]) -> str:
        found = observation.get(self._observation, observation)
        return found if isinstance(found, str) else json.dumps(found)
