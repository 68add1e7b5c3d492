"""The progress line of a run, which is shown in the terminal and logged every few seconds:

step 322/2700 0:33 left 4:05 | held-out 92.4 % | reward .95 | len 24 | stale 1.6/2 | gen 18k t/s 91 % | train 14k 74 %
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from statistics import fmean

from stretto.store.series.metrics import EvaluationLine, StepMetrics

#: Most characters of a line.
LONGEST = 120
#: Explanation of the progress line.
LEGEND = (
    "held-out: accuracy on prompts never trained on | len: tokens | stale: versions/bound | gen, train: tokens/s, busy"
)
_RATE_SECONDS = 3.0  # window of the mean tokens per second
_UNITS = ((1e9, "G"), (1e6, "M"), (1e3, "k"))
_ENGINE, _TRAINER = "engine", "trainer"


class RunProgress:
    """Collects the newest step, held-out accuracy and token rates of a run of `steps` steps (0: not known), and formats
    the progress line."""

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self._newest: StepMetrics | None = None
        self.held_out: EvaluationLine | None = None
        self._trained = 0
        self._counts: deque[tuple[float, int, int]] = deque()  # rl seconds, tokens generated, tokens trained

    def step(self, metrics: StepMetrics) -> None:
        self._newest = metrics
        self._trained += metrics.trained_tokens
        self._counts.append((metrics.rl_seconds, metrics.generated_tokens, self._trained))
        while len(self._counts) > 2 and metrics.rl_seconds - self._counts[1][0] > _RATE_SECONDS:
            self._counts.popleft()

    def evaluated(self, evaluation: EvaluationLine) -> None:
        self.held_out = evaluation

    def rates(self) -> dict[str, float]:
        """Tokens per second over about the last 3 seconds (or the last step, if it took longer), as ``generated`` and
        ``trained``; empty before two steps."""
        if not self._counts:
            return {}
        (then, generated_then, trained_then), (now, generated, trained) = self._counts[0], self._counts[-1]
        if now <= then:
            return {}
        seconds = now - then
        return {"generated": (generated - generated_then) / seconds, "trained": (trained - trained_then) / seconds}

    def line(self) -> str:
        """Format the progress line of the newest step, with at most 120 characters; empty before the first step."""
        if (metrics := self._newest) is None:
            return ""
        head = f"step {_times(metrics.step, self.steps, metrics.rl_seconds)}"
        parts = [(0, head), *self._measured(metrics), *self._work(metrics)]
        while len(text := " | ".join(part for _, part in parts)) > LONGEST and len(parts) > 1:
            parts.remove(max(parts))
        return text[:LONGEST]

    # Parts of the line, each with a number: if the line is too long, parts with the greatest numbers are left out.

    def _measured(self, metrics: StepMetrics) -> Iterator[tuple[int, str]]:
        if self.held_out is not None:
            known = self.held_out.known
            yield 2, f"held-out {'–' if known is None else _percent(known, 1)}"
        yield 3, f"reward {brief(metrics.reward)}"
        yield 7, f"len {brief(metrics.length_mean)}"
        bound = "" if metrics.max_staleness is None else f"/{metrics.max_staleness:g}"
        yield 6, f"stale {brief(metrics.staleness_mean)}{bound}"

    def _work(self, metrics: StepMetrics) -> Iterator[tuple[int, str]]:
        """Yield the parts of the line about engines, trainer, and another role if it is busier than both; each with its
        number, by which `line` leaves parts out."""
        busy = {role: share for role, share in metrics.busy.items() if share is not None}
        engines = [share for role, share in busy.items() if role.startswith(_ENGINE)]
        rates = self.rates()
        generating, training = fmean(engines) if engines else None, busy.get(_TRAINER)
        if (work := _rate(rates.get("generated"), " t/s", generating)) is not None:
            yield 4, f"gen {work}"
        if (work := _rate(rates.get("trained"), "", training)) is not None:
            yield 5, f"train {work}"
        others = [(share, role) for role, share in busy.items() if role != _TRAINER and not role.startswith(_ENGINE)]
        if others and max(others)[0] > max(generating or 0.0, training or 0.0):
            share, role = max(others)
            yield 1, f"{role[:16]} {_percent(share)}"


def lesson_line(phase: str, step: int, steps: int, seconds: float, loss: float, accuracy: float | None) -> str:
    """Format a progress line of supervised training. `phase`: name in front; `step` of `steps` (0: not known) after
    `seconds`; `accuracy`: None if it is not measured.

    >>> lesson_line("warm start", 10, 300, 12.0, 0.31, None)
    'warm start 10/300 0:12 left 5:48 | loss 0.3100'
    """
    right = "" if accuracy is None else f" | accuracy {_percent(accuracy, 1)}"
    return f"{phase} {_times(step, steps, seconds)} | loss {loss:.4f}{right}"


def seconds_left(step: int, steps: int, seconds: float) -> float | None:
    """Estimate the seconds until the last step from the mean time per step; None before the second step (the first has
    the loading and compiling), after the last one, or if `steps` is 0 (not known)."""
    return seconds / step * (steps - step) if 1 < step <= steps else None


def clock(seconds: float) -> str:
    """Format a duration in seconds.

    >>> clock(33.4), clock(245), clock(3725)
    ('0:33', '4:05', '1:02:05')
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def brief(number: float) -> str:
    """Format a number in two digits, or all digits before the point if there are more.

    >>> [brief(number) for number in (0.9512, -0.5, 1.6, 24.3, 987, 17_950, 1.4e6, 0)]
    ['.95', '-.5', '1.6', '24', '987', '18k', '1.4M', '0']
    """
    unit, name = next(((unit, name) for unit, name in _UNITS if abs(number) >= unit), (1.0, ""))
    scaled = number / unit
    text = f"{scaled:.0f}" if abs(scaled) >= 10 else f"{scaled:.2g}"
    return text.replace("0.", ".", 1) + name if text.lstrip("-").startswith("0.") else text + name


def _times(step: int, steps: int, seconds: float) -> str:
    left = seconds_left(step, steps, seconds)
    of = f"/{steps}" if steps else ""
    return f"{step}{of} {clock(seconds)}" + ("" if left is None else f" left {clock(left)}")


def _rate(rate: float | None, unit: str, busy: float | None) -> str | None:
    parts = [f"{brief(rate)}{unit}"] if rate is not None and math.isfinite(rate) else []
    parts += [_percent(busy)] if busy is not None else []
    return " ".join(parts) or None


def _percent(share: float, digits: int = 0) -> str:
    return f"{100 * share:.{digits}f} %"
