"""Alarms about learning (accuracy, gradient, distance of policies), about engines whose log-probabilities differ from
the trainer's, and about a role whose memory keeps growing.

Each alarm uses measurements that no recipe can turn off, or has a fallback.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise

import numpy as np

from stretto.store.series.metrics import alike
from stretto_report.audit.evidence import (
    WINDOW,
    Alarm,
    Evidence,
    Flags,
    Numbers,
    apart,
    collapsed,
    fallen,
    measured,
    newest_mean,
    rises,
    still,
)

_RISING = 0.01  # nats a token
_HALF, _QUARTER = 0.5, 0.25  # of the tolerance
_ERROR = "trainer.behavior_logprob_error"


def mismatch(found: Evidence) -> Iterator[Alarm]:
    """Yield an alarm if, in the two newest measured steps, the log-probabilities of engine and trainer differ by more
    than rounding explains for their dtypes; else one if their mean difference over the newest ten measured steps
    exceeds 0.01 nats a token and three times that over the first ten."""
    values = found.series.get(_ERROR)
    if values is None:
        return
    known = np.flatnonzero(np.isfinite(values))
    beyond = values[known] > found.mismatch
    if len(known) >= 2 and beyond[-2:].all():
        within = np.flatnonzero(~beyond)
        first = int(found.steps[known[within[-1] + 1 if len(within) else 0]])
        message = f"engine and trainer differ by {values[known[-1]]:.2g} nats a token, {found.mismatch:g} are rounding"
        yield Alarm("mismatch", "mismatch of engine and trainer", first, message, f"series:{_ERROR}")
    elif (ill := apart(found.steps, values, lambda mean, begin: (mean > 3 * begin) & (mean > _RISING))) is not None:
        message = f"engine and trainer differed by {ill.was:.2g} nats a token, and differ by {ill.now:.2g}"
        yield Alarm("mismatch", "mismatch of engine and trainer", ill.first, message, f"series:{_ERROR}")


def canary_drifting(found: Evidence) -> Iterator[Alarm]:
    """Yield an alarm for each engine whose canary difference from the trainer, averaged over the newest ten measured
    steps, is at least half of its tolerance, or at least a quarter of it and more than three times that of the first
    ten."""
    for name, values in found.series.items():
        if not name.startswith("canary."):
            continue
        ill = apart(
            found.steps,
            values,
            lambda mean, begin: (mean >= _HALF) | ((mean >= _QUARTER) & (mean > 3 * begin)),
            1,
        )
        if ill is not None:
            engine = name.removeprefix("canary.")
            message = f"{engine} was at {ill.was:.0%} of what it may be from the trainer, and is at {ill.now:.0%}"
            yield Alarm("canary_drifting", "an engine drifts from the trainer", ill.first, message, f"series:{name}")


_WORSE = 0.2  # loss, as a share of the best accuracy
_BAD_STEPS = 0.2  # of the steps of a window
_FAR, _FAR_REFERENCE = 0.5, 3.0  # nats a token


def reward_without_accuracy(found: Evidence) -> Iterator[Alarm]:
    """Yield an alarm if, since the best held-out accuracy, the reward has risen and the accuracy has fallen, both by
    more than chance: the policy games the reward."""
    if (worse := fallen(found.evaluations, found.left_out)) is None:
        return
    (best, since), last = worse, found.evaluations[-1]
    if (rise := rises(found.steps, found.series.get("reward"), best.step, last.step)) is not None:
        message = (
            f"the reward rose from {rise[0]:.3f} to {rise[1]:.3f} while the held-out accuracy fell from "
            f"{best.accuracy:.1%} (step {best.step}) to {last.accuracy:.1%}"
        )
        yield Alarm("reward_without_accuracy", "reward without accuracy", since.step, message, "series:reward")


def accuracy_falling(found: Evidence) -> Iterator[Alarm]:
    """Yield an alarm if the held-out accuracy has lost at least a fifth of its best value, by more than chance, while
    the reward has not risen; else one if training completions are right less than half as often as in their best ten
    steps, unless an evaluation since then is at least half as good as the best before."""
    name, title, (steps, series) = "accuracy_falling", "accuracy falling", (found.steps, found.series)
    last = found.evaluations[-1] if found.evaluations else None
    if last is not None and (worse := fallen(found.evaluations, found.left_out)) is not None:
        best, since = worse
        lost = best.accuracy - last.accuracy >= _WORSE * best.accuracy
        if lost and rises(steps, series.get("reward"), best.step, last.step) is None:
            message = (
                f"the held-out accuracy fell from {best.accuracy:.1%} (step {best.step}) to {last.accuracy:.1%}, and "
                "the reward has not risen: what the model could do is destroyed; trainer.learning_rate may be too high"
            )
            yield Alarm(name, title, since.step, message, "series:accuracy")
            return
    ill = collapsed(steps, series.get("accuracy"))
    if ill is not None and not _denied(found, ill.first):
        message = f"{ill.was:.1%} of the completions were right, and {ill.now:.1%} are"
        yield Alarm(name, title, ill.first, message, "series:accuracy")


def _denied(found: Evidence, since: int) -> bool:
    """Whether the held-out questions deny that the accuracy fell at the step `since`: those of training are harder."""
    lines = alike(found.evaluations) if found.evaluations else []
    best = max((line.accuracy for line in lines if line.step < since), default=0.0)
    return bool(best) and lines[-1].step >= since and lines[-1].accuracy >= 0.5 * best


def dead_gradient(found: Evidence) -> Iterator[Alarm]:
    """Yield an alarm if the gradient norm has stayed below a ten-thousandth of its initial median for ten measured
    steps, unless at least 98 % of the newest completions are right."""
    name = "trainer.grad_norm"
    right = found.series.get("accuracy")
    if right is not None and measured(right) and newest_mean(right) >= 0.98:
        return
    if (ill := still(found.steps, found.series.get(name))) is not None:
        message = (
            f"the norm of the gradient is {ill.now:.3g}, and was {ill.was:.3g}: nothing is learned; the completions of "
            "each prompt are alike, or worth the same"
        )
        yield Alarm("dead_gradient", "dead gradient", ill.first, message, f"series:{name}")


def exploding_gradient(found: Evidence) -> Iterator[Alarm]:
    """Yield an alarm if the geometric mean of the gradient norm over the newest ten measured steps is more than a
    hundred times that over the first ten, or more than 10,000."""
    name = "trainer.grad_norm"
    ill = apart(
        found.steps, found.series.get(name), lambda mean, begin: (mean > 100 * begin) | (mean > 1e4), 1, geometric=0.1
    )
    if ill is not None:
        message = f"the norm of the gradient was {ill.was:.3g}, and is {ill.now:.3g}: each update is a step of noise"
        yield Alarm("exploding_gradient", "exploding gradient", ill.first, message, f"series:{name}")


def policy_apart(found: Evidence) -> Iterator[Alarm]:
    """Yield an alarm if the policy diverges by more than 0.5 nats a token from the versions that sampled its tokens, or
    else by more than 3 from the reference (geometric means over the newest ten measured steps); one at most."""
    for name, bound, other in (
        ("trainer.kl_behavior", _FAR, "the versions that sampled its tokens"),
        ("trainer.kl_reference", _FAR_REFERENCE, "its reference"),
    ):
        ill = apart(found.steps, found.series.get(name), _above(bound), 1, geometric=0.01)
        if ill is not None:
            message = f"the policy is {ill.now:.3g} nats a token away from {other}"
            yield Alarm("policy_apart", "policy far away", ill.first, message, f"series:{name}")
            return


def bad_steps(found: Evidence) -> Iterator[Alarm]:
    """Yield an alarm if at least a fifth of the newest ten measured steps had a gradient that was not finite and was
    therefore skipped."""
    name = "trainer.bad_steps"
    values = found.series.get(name)
    some = None if values is None else np.where(np.isfinite(values), values > 0, np.nan)
    if (ill := apart(found.steps, some, lambda mean, begin: mean >= _BAD_STEPS, 1)) is not None:
        message = f"{ill.now:.0%} of the newest {WINDOW} steps have a gradient that is not finite, and is left out"
        yield Alarm("bad_steps", "gradients not finite", ill.first, message, f"series:{name}")


def _above(bound: float) -> Callable[[Numbers, float], Flags]:
    return lambda mean, begin: mean > bound


_STEPS, _SHARE, _MIB = 16 * WINDOW, 0.1, 64.0


def memory_growing(found: Evidence) -> Iterator[Alarm]:
    """Yield an alarm for each role whose memory has grown in each quarter of the newest 160 (or 320, 640, …) steps, in
    all by at least a tenth and at least 64 MiB, and in the second half at least half as much as in the first.
    (Caches fill more and more slowly; a leak does not slow down.) The first ten measurements do not count."""
    for name in sorted(series for series in found.series if series.startswith("memory.")):
        values = found.series[name]
        known = np.flatnonzero(np.isfinite(values))[WINDOW:]
        steps, span = found.steps[known], _STEPS
        while len(known) and span <= steps[-1] - steps[0] + 1:
            ends = np.searchsorted(steps, steps[-1] - span + np.linspace(WINDOW, span, 5).astype(int), side="right")
            enough = np.diff(ends, prepend=0).min() >= WINDOW
            at = [float(values[known[end - WINDOW : end]].mean()) if enough else 0.0 for end in ends]
            rises = all(before < after for before, after in pairwise(at))
            if rises and at[4] - at[0] >= max(_SHARE * at[0], _MIB) and at[4] - at[2] >= (at[2] - at[0]) / 2:
                first, last = int(found.steps[known[ends[0] - 1]]), int(found.steps[known[-1]])
                role, each = name.removeprefix("memory."), (at[4] - at[0]) / max(last - first, 1)
                message = f"it grew from {at[0]:,.0f} to {at[4]:,.0f} MiB by step {last}, {each:.2g} MiB a step"
                yield Alarm("memory_growing", f"memory of {role} growing", first, message, f"series:{name}")
                break
            span *= 2
