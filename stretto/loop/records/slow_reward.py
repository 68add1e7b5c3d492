"""Notices a reward that is slower than generation: its workers are always busy, and the engines are not."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

WINDOW = 10.0  # seconds over which work is counted: a worker that judges a long answer tells of it at its end
_SATURATED = 0.9


class SlowReward:
    """Told every second or so how long each role has worked; `name` is what the recipe calls the reward."""

    def __init__(self, name: str, workers: int) -> None:
        self.name, self.workers = name, workers
        self.found = ""  #: the name, while the reward is what the run waits for
        self._told = False
        self._seen: deque[tuple[float, float, float]] = deque()  # when, seconds of the rewards, of the busiest engine

    def poll(self, now: float, seconds: Mapping[str, float]) -> str | None:
        """The sentence for the log when it is noticed for the first time. `seconds`: of work by role, since the start.

        Example: rewards 9.8 s and engine-0 4.0 s of work in the last 10 s.
        """
        engines = [worked for role, worked in seconds.items() if role.startswith("engine")]
        self._seen.append((now, seconds.get("rewards", 0.0), max(engines, default=0.0)))
        while len(self._seen) > 2 and now - self._seen[1][0] >= WINDOW:
            self._seen.popleft()
        (since, judged_then, generated_then), (_, judged, generated) = self._seen[0], self._seen[-1]
        if now - since < WINDOW:
            return None
        judging, generating = (judged - judged_then) / (now - since), (generated - generated_then) / (now - since)
        self.found = self.name if judging >= _SATURATED and generating < _SATURATED * judging else ""
        if not self.found or self._told:
            return None
        self._told = True
        return (
            f"the reward {self.name!r} is slower than generation: its workers are busy {min(1.0, judging):.0%} of the "
            f"time, the busiest engine {min(1.0, generating):.0%}; rewards.workers = {self.workers} may be too few"
        )
