"""Environments behind an address of OpenEnv, as worlds: ``pip install openenv``.

    [workflow]
    function = "environment"

    [workflow.settings]
    make = "openenv_world:Remote"                # this file, beside the recipe
    arguments = { url = "http://127.0.0.1:8000", action = "message", observation = "text" }

OpenEnv's plain requests ``/reset`` and ``/step`` make an environment each; one that lasts for an episode is behind its
client, which this uses.
"""

from __future__ import annotations

import json
from typing import Any

from openenv.core.generic_client import GenericEnvClient


class Remote:
    """One episode. `action` and `observation` are the fields in which the texts are."""

    def __init__(self, url: str, action: str, observation: str) -> None:
        self._action, self._observation = action, observation
        self._client = GenericEnvClient(base_url=url).sync()

    def reset(self, seed: int) -> str:
        """Begin; the first observation."""
        return self._text(self._client.reset(seed=seed % 2**31).observation)

    def step(self, action: str) -> tuple[str, float, bool]:
        """An action: the observation behind it, its reward, whether the episode has ended."""
        result = self._client.step({self._action: action})
        return self._text(result.observation), float(result.reward or 0.0), bool(result.done)

    def close(self) -> None:
        """End the session."""
        self._client.close()

    def _text(self, observation: dict[str, Any]) -> str:
        found = observation.get(self._observation, observation)
        return found if isinstance(found, str) else json.dumps(found)
