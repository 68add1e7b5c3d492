"""A world of reset and step: a number from 1 to 8, which is the seed's, is to be guessed."""

from __future__ import annotations


class Guessing:
    def __init__(self, tries: int = 3, broken: bool = False) -> None:
        self._left, self._broken = tries, broken

    def reset(self, seed: int) -> str:
        self._number = seed % 8 + 1
        return "Guess a number from 1 to 8."

    def step(self, action: str) -> tuple[str, float, bool]:
        if self._broken:
            raise RuntimeError("the world has ended")
        self._left -= 1
        if int(action) == self._number:
            return "", 1.0, True
        return "lower" if int(action) > self._number else "higher", -0.25, self._left == 0

    def close(self) -> None:
        """Nothing is left."""
