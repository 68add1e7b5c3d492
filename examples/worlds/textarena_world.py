"""Games of textarena for one player, as worlds: ``pip install textarena``.

[workflow]
function = "environment"

[workflow.settings]
make = "textarena_world:Game"                # this file, beside the recipe
arguments = { name = "GuessTheNumber-v0" }
"""

from __future__ import annotations

import threading

import textarena

_SEEDING = threading.Lock()  # games share the random generator of the process


class Game:
    """One game. An observation of textarena repeats the earlier text; only the new part is returned."""

    def __init__(self, name: str) -> None:
        self._name, self._told = name, ""

    def reset(self, seed: int) -> str:
        """Begin a game; return the rules."""
        with _SEEDING:
            self._game = textarena.make(self._name)
            self._game.reset(num_players=1, seed=seed % 2**32)
        return self._news()

    def step(self, action: str) -> tuple[str, float, bool]:
        """Make a move; return the new text, the reward (at the end), and whether the game has ended."""
        done, _ = self._game.step(action)
        if not done:
            return self._news(), 0.0, False
        rewards, _ = self._game.close()
        return "", float(rewards[0]), True

    def close(self) -> None:
        """Nothing to release."""

    def _news(self) -> str:
        _, text = self._game.get_observation()
        new, self._told = str(text).removeprefix(self._told), str(text)
        return new.strip()
