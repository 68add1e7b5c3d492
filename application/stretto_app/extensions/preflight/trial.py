"""Trial of user-defined parts before a run, on made-up groups and tokens. A fault is a phrase that follows the name of
the part in a message.

A reward judges gold answers as completions: the verdicts should be right, in time, and twice the same. Other parts are
called on made-up values.

Axes: N loss token, S sequence.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import median

import torch
from torch import Tensor

from stretto.core.errors import Problem, RecipeError, RewardFunctionError, RoleError, several
from stretto.core.records import Group, Outcome, Prompt, Segment, StopReason, Trajectory, Verdict, trajectory_id
from stretto.doors.door import Section, raised
from stretto.doors.loading import from_package, is_own
from stretto.engine.config import MAKES
from stretto.launch.preflight.questions import place_of
from stretto.launch.recipe.extensions import OUTLETS
from stretto.launch.recipe.recipe import Recipe
from stretto.rewards.built_in import BUILT_IN
from stretto.rewards.config import RewardsConfig
from stretto.rewards.service.judging import PLACE
from stretto.rewards.service.pool import TIMED_OUT, RewardPool
from stretto.rewards.service.wire import ScoreItem
from stretto.rollout.config import FILTERS, PACINGS, RolloutConfig
from stretto.rollout.filters import Filter
from stretto.rollout.pacing import pacing_of
from stretto.rollout.questions import Question
from stretto.trainer.objective.corrections import CORRECTIONS, Correction
from stretto.trainer.objective.estimators import ESTIMATORS, EstimatorSection, RewardedCompletion, estimate_faults
from stretto.trainer.objective.surrogates import LOSSES, LossSection
from stretto.trainer.objective.tokens import LossTokens, Sequences
from stretto_verify.clock import clock_limit
from stretto_verify.thoughts import closed

_GROUPS = ((1.0, 0.0, 0.0, 1.0), (0.0, 0.0), (1.0,))  # rewards of the made-up groups that a filter gets


def filter_faults(refuses: Filter, name: str, refusing: list[str]) -> Iterator[str]:
    """Call the filter `refuses` on made-up groups, and yield the faults of its results, none if all are well. Append
    its `name` to `refusing` if it refuses all trajectories. Errors raised by the filter pass through."""
    kept = 0
    for group in map(_made_up_group, _GROUPS):
        ids = {trajectory.id for trajectory in group.trajectories}
        found: object = refuses(group)
        if not isinstance(found, Mapping):
            yield f"returned {type(found).__name__}, and not a reason for each trajectory that is refused, by its id"
        elif strange := [id for id in found if id not in ids]:
            yield f"refuses {strange[0]!r}, which is no trajectory of the group; ids are such as {min(ids)!r}"
        elif bare := [reason for reason in found.values() if not (isinstance(reason, str) and reason)]:
            yield f"gives {bare[0]!r} as a reason, and not a text"
        else:
            kept += len(ids) - len(found)
    if not kept:
        refusing.append(name)


def _made_up_group(rewards: Sequence[float]) -> Group:
    """A group with one trajectory per reward, the last of them truncated."""
    ends = [StopReason.STOP] * (len(rewards) - 1) + [StopReason.LENGTH]
    trajectories = []
    for member, (reward, end) in enumerate(zip(rewards, ends, strict=True)):
        segment = Segment.of((4, 4, 2), (-0.1, -0.7, -0.02), (6, 6, 7), stop_reason=end)
        verdict = Verdict(Outcome.RIGHT if reward else Outcome.WRONG, reward)
        trajectories.append(Trajectory(trajectory_id("0.17.0", member), (segment,), verdict, "11"))
    return Group("0.17.0", Prompt("17", (5, 12, 8, 13), "3+8=", "11"), 6, tuple(trajectories), 4.0)


def pacing_faults(config: RolloutConfig, name: str, early: list[str]) -> Iterator[str]:
    """Create and call the recipe's pacing policy, and yield the faults found. Append its `name` to `early` if it starts
    a group although the staleness bound or `max_in_flight` forbids it. Errors raised by it pass through."""
    if not callable(getattr(PACINGS.bound(config.pacing)(), "opens", None)):
        yield "has no method opens(may_start, in_flight) (docs/how_to/doors/pacing.md)"
        return
    opens = pacing_of(config, in_rounds=False)
    for may_start, in_flight in ((True, 0), (True, 1), (False, 1), (False, 0)):
        found = opens(may_start, in_flight)
        if not isinstance(found, bool):
            yield f"returned {found!r} for opens({may_start}, {in_flight}), and not whether a group starts"
            return
    opens = pacing_of(config, in_rounds=False)
    if any(opens(False, in_flight) for in_flight in (0, 1, 2)):
        early.append(name)


_LENGTHS = ((3, 1, 2), (1,))  # loss tokens of each sequence of a micro-batch
_BATCHES = (((1.0, 0.0, 0.5), (0.0, 0.0)), ((1.0,),))  # rewards of each group


def loss_faults(loss: LossSection) -> Iterator[str]:
    """Call a loss, its selection and its gradient on made-up tokens, and yield the faults of their results. Errors
    raised by the loss pass through."""
    for lengths in _LENGTHS:
        policy, tokens = _made_up_tokens(lengths)
        if (selection := loss.selection) is not None:
            kept = selection(policy.detach() - tokens.anchor_logprobs, tokens.advantages)
            if faults := [*_column("its selection", kept, len(policy), torch.bool)]:
                yield from faults
                return
            tokens = replace(tokens, kept=kept)
        terms = loss.surrogate(policy, tokens)
        faults = [
            *_column("objective", terms.objective, len(policy), torch.float32),
            *_column("ratio", terms.ratio, len(policy), torch.float32),
            *_column("bounded", terms.bounded, len(policy), torch.bool),
        ]
        if not faults and not terms.objective.requires_grad:
            faults = ["has an objective without a gradient: it does not depend on policy_logprobs"]
        elif not faults:
            (gradient,) = torch.autograd.grad(terms.objective.sum(), policy)
            faults = [*_column("the gradient of its objective", gradient, len(policy), torch.float32)]
        if faults:  # the next micro-batch would repeat them
            yield from faults
            return


def correction_faults(correction: Correction) -> Iterator[str]:
    """Call a correction on made-up tokens, and yield the faults of its results. Errors raised by it pass through."""
    for lengths in _LENGTHS:
        policy, tokens = _made_up_tokens(lengths)
        weights = correction(tokens)
        faults = [
            *_column("weight", weights.weight, len(policy), torch.float32),
            *_column("corrected", weights.corrected, len(policy), torch.bool),
        ]
        if faults:
            yield from faults
            return


def estimator_faults(estimator: EstimatorSection) -> Iterator[str]:
    """Call an advantage estimator on made-up rewards, and yield the faults of its results. Errors raised by it pass
    through."""
    for rewards in _BATCHES:
        groups = [[RewardedCompletion(one, 2 + at, (0, 1 + at)) for at, one in enumerate(group)] for group in rewards]
        yield from estimate_faults(estimator, groups, ESTIMATORS.bound(estimator)(groups))


def _made_up_tokens(lengths: Sequence[int]) -> tuple[Tensor, LossTokens]:
    """Made-up sequences of these lengths: the log-probabilities [N] of a policy, differentiable, and the N tokens as
    sampled by an older policy."""
    place_N = torch.arange(float(sum(lengths)))
    behavior_N = -0.2 - 0.3 * place_N
    sign_N = 1 - 2 * (place_N % 2)  # every other token has become less likely, or has a negative advantage
    tokens = LossTokens(
        behavior_logprobs=behavior_N,
        anchor_logprobs=behavior_N + 0.1 * sign_N,
        advantages=(0.5 + place_N) * sign_N,
        scale=torch.full_like(place_N, 1 / sum(lengths)),
        sequences=Sequences.of(torch.tensor(lengths)),
    )
    return (behavior_N - 0.05 * place_N).requires_grad_(), tokens


def _column(name: str, found: object, tokens: int, dtype: torch.dtype) -> Iterator[str]:
    """Yield the fault, if any, of the result `found` called `name`: it should be a tensor of one finite number, or
    bool, for each of the `tokens` tokens. `dtype`: bool if it should be bools, else a floating-point dtype."""
    if not isinstance(found, Tensor):
        yield f"{name} is {type(found).__name__}, and not a tensor"
    elif found.shape != (tokens,):
        yield f"{name} has the shape {[*found.shape]} for {several(tokens, 'token')}, and not [{tokens}]"
    elif (found.dtype == torch.bool) != (dtype == torch.bool) or found.is_complex():
        yield f"{name} is of {found.dtype}, and not of {dtype}"
    elif not bool(found.isfinite().all()):
        yield f"{name} has {found[~found.isfinite()][0].item()} in it, of finite log-probabilities and advantages"


_TRIED = 4  # number of gold answers that a user-defined reward judges
_TRIED_BUILT_IN = 64  # the same for a built-in reward, which is fast
_PATIENCE = 10.0  # seconds for the trial of one part
_MOST_FAULTS = 3  # most faults that are reported of one part


def try_parts(recipe: Recipe, *, outlets: bool) -> list[str]:
    """Call the recipe's user-defined loss, correction, advantages, filters, pacing and engine make on made-up values.

    `outlets`: also try user-defined outlets, which may publish the values.

    Returns:
        A warning for each filter that refuses all that it was tried on, and one if the pacing starts groups that the
        staleness bound does not allow.

    Raises:
        RecipeError: a part raises, returns a wrong type, or does not return within 10 seconds; names all of them.
    """
    refusing, early = list[str](), list[str]()
    found = _trials(recipe, outlets, refusing, early)
    trials = [(key, name, trial) for key, part, trial in found if is_own(name := _name(part))]
    if problems := [problem for key, name, trial in trials for problem in _faults(key, name, trial)]:
        raise RecipeError(problems)
    told = [
        f"{FILTERS.key}: {name!r} refuses all trajectories that it was tried on; if it refuses all of a run, no batch "
        "is ever complete"
        for name in refusing
    ]
    return told + [
        f"{PACINGS.key}: {name!r} starts groups where equation 3 does not allow it: tokens may be older than "
        "rollout.max_staleness when they are trained, and `stretto check` will say so"
        for name in early
    ]


def _trials(
    recipe: Recipe, outlets: bool, refusing: list[str], early: list[str]
) -> Iterator[tuple[str, str | Section, Callable[[], Iterator[str]]]]:
    """Yield (recipe key, part, trial) for every part that the recipe names; `outlets`: also for outlets. A trial calls
    the part and yields its faults; that of a filter may append to `refusing`, that of a pacing to `early`."""
    algorithm, rollout, engine, logging = recipe.algorithm, recipe.rollout, recipe.engine, recipe.logging
    correction = CORRECTIONS.bound(algorithm.correction)
    yield LOSSES.key, algorithm.loss, partial(loss_faults, algorithm.loss)
    yield CORRECTIONS.key, algorithm.correction, partial(correction_faults, correction)
    yield ESTIMATORS.key, algorithm.advantages, partial(estimator_faults, algorithm.advantages)
    for one in rollout.filters:
        yield FILTERS.key, one, partial(filter_faults, FILTERS.bound(one), _name(one), refusing)
    yield PACINGS.key, rollout.pacing, partial(pacing_faults, rollout, _name(rollout.pacing), early)
    make = partial(_by_package, "stretto_servers.make:make_faults", MAKES.key)
    yield MAKES.key, engine.kind, partial(make, engine, recipe.model.path or "model")
    outlet = partial(_by_package, "stretto_report.outlets.trial:outlet_faults", OUTLETS.key)
    for tool in logging.to if outlets else ():
        yield OUTLETS.key, tool, partial(outlet, tool, logging)


def _by_package(place: str, key: str, *arguments: object) -> Iterator[str]:
    faults: Iterator[str] = from_package(place, key)(*arguments)
    return faults


def _name(part: str | Section) -> str:
    return part.kind if isinstance(part, Section) else part


def _faults(place: str, name: str, trial: Callable[[], Iterator[str]]) -> list[Problem]:
    """Run the trial of a part in a thread; returns the problems, at most three; an exception of the trial is one. If
    the trial does not return within 10 seconds, that is the problem, and the thread is abandoned.

    Args:
        place: recipe key.
        name: of the part.
        trial: calls the part and yields its faults.
    """
    found: list[Problem] = []

    def run() -> None:
        try:
            found.extend(Problem(place, f"{name!r} {fault}") for fault in trial())
        except RecipeError as error:
            found.extend(error.problems)
        # Nobody interrupts or cancels this thread: whatever is raised, KeyboardInterrupt included, is the part's own.
        except BaseException as error:
            found.append(raised(place, name, error))

    thread = threading.Thread(target=run, name=f"trial of {name}", daemon=True)
    thread.start()
    thread.join(_PATIENCE)
    if thread.is_alive():
        return [Problem(place, f"{name!r} has not returned after {_PATIENCE:g} s, on a few made-up values")]
    return list(dict.fromkeys(found))[:_MOST_FAULTS]


@dataclass(frozen=True)
class _Call:
    question: Question
    verdict: Verdict
    seconds: float  # by the clock
    computed: float  # seconds of processor time

    def is_late(self, limit: float) -> bool:
        """Whether the verdict comes too late in a run, whose limit is `limit` seconds of processor time."""
        return self.computed > limit or self.seconds > clock_limit(limit)


def try_reward(
    config: RewardsConfig, questions: Sequence[Question], patience: float = _PATIENCE, completions: int = 0
) -> list[str]:
    """Let each reward judge the first gold answers of its questions twice, as completions; returns warnings about slow
    or missing verdicts, wrong ones, and two verdicts that differ.

    Only the first reward of a source must find the gold answers right; others may judge something else. Built-in
    rewards are tried only on gold answers from files, since generated ones are right, and not if they have a section of
    their own (code, judge). A user-defined reward may be random or ignore the gold answer, so wrong verdicts are a
    warning, not an error.

    Args:
        questions: the training questions.
        patience: seconds for the trial of each reward: no call begins later, and none of the first round after half of
            them, except for the first of a round. One call may take these seconds by the clock, or as long as in a run
            if that is longer; then the trial ends.
        completions: of a training step; a warning says how long they take if that is more than 10 seconds.

    Raises:
        RewardFunctionError: the workers do not start, no call returned a verdict within the reward's time limit, or a
            built-in reward finds no gold answer right.
        RoleError: the machine lacks resources for a worker.
    """
    told: list[str] = []
    decided: set[str] = set()
    for part in config.parts:
        judged = [question for question in questions if not part.sources or question.source in part.sources]
        decides = [question for question in judged if question.source not in decided]
        tried, calls = _tried(config.alone(part), decides or judged, patience, decides=bool(decides))
        told += [*tried, *_slow(config.alone(part), calls, completions)]
        decided |= {question.source for question in judged}
    return told


def _tried(
    config: RewardsConfig, questions: Sequence[Question], patience: float, *, decides: bool
) -> tuple[list[str], list[_Call]]:
    built_in = config.function in BUILT_IN
    if built_in and BUILT_IN[config.function].configured:
        return [], []  # programs, a judge, ...: a gold answer is no completion
    rows = [row for row in questions if row.place][:_TRIED_BUILT_IN] if built_in else questions[:_TRIED]
    if not rows:
        return [], []
    try:
        first, second = asyncio.run(_twice(config, rows, patience))
    except RoleError as error:
        if isinstance(error.__cause__, OSError):  # the machine lacks resources: not the user's mistake
            raise
        raise RewardFunctionError([Problem(PLACE, str(error))]) from None
    limit, calls = config.seconds_per_completion, [*first, *second]
    if all(_is_lost(call, limit) for call in calls):
        raise RewardFunctionError([_lost(config, calls[-1], len(calls))])
    wrong = [call for call in first if call.verdict.outcome is Outcome.WRONG]
    warnings = [_lost(config, call, 1) for call in first if _is_lost(call, limit)]
    if decides and (len(wrong) == len(rows) or (wrong and built_in)):
        warnings.append(_wrong(config, wrong, len(rows)))
        if built_in and len(wrong) == len(rows):
            raise RewardFunctionError(warnings)
    differing = _differing(config, first, second)
    return [*map(str, warnings), *(_beyond(config, calls) if decides else ()), *differing], calls


async def _twice(config: RewardsConfig, rows: Sequence[Question], patience: float) -> tuple[list[_Call], list[_Call]]:
    """Judge the gold answers of these rows twice; returns the calls of both rounds, of which each has at least one. No
    call begins after `patience` seconds, and none of the first round after half of them; nor behind one that is not
    done by its deadline, since the reward may hang."""
    limit = config.seconds_per_completion
    patient = {"workers": 1, "max_consecutive_undecided": 1 << 20, "timeout": max(limit, patience)}
    first: list[_Call] = []
    second: list[_Call] = []
    async with RewardPool(config.model_copy(update=patient)) as pool:
        began = time.monotonic()
        for calls, end in ((first, began + patience / 2), (second, began + patience)):
            for row in rows:
                if calls and time.monotonic() > end:
                    break
                start, before = time.monotonic(), pool.processor_seconds
                item = ScoreItem(closed(row.text), row.answer, row.answer, row.fields)
                try:
                    [verdict] = await asyncio.wait_for(pool.score([item]), max(clock_limit(limit), patience))
                except TimeoutError:
                    verdict = Verdict(Outcome.UNDECIDED, None, TIMED_OUT)
                seconds, computed = time.monotonic() - start, pool.processor_seconds - before
                calls.append(_Call(row, verdict, seconds, computed))
                if verdict.reason == TIMED_OUT:
                    return first, second
    return first, second


def _is_lost(call: _Call, limit: float) -> bool:
    return call.verdict.outcome is Outcome.UNDECIDED or call.is_late(limit)


def _lost(config: RewardsConfig, call: _Call, count: int) -> Problem:
    """Describe `count` lost calls as a problem, by the last of them, `call`: without a verdict, late, or too slow."""
    which = f"the gold answer of {place_of(call.question)}, judged as a completion"
    if call.verdict.outcome is Outcome.UNDECIDED and not call.verdict.reason.startswith(TIMED_OUT):
        times = f"in any of {several(count, 'call')}" if count > 1 else "in one call"
        found = f"{config.function!r} returned no verdict {times}, on {which}: {call.verdict.reason}"
        return Problem(PLACE, found, "undecided completions are never trained on")
    done = "took" if call.verdict.outcome is not Outcome.UNDECIDED else "was not done after"
    limit = config.seconds_per_completion
    if call.computed > limit:
        spent, most, enough = f"{call.computed:.1f} s of processor time", limit, 3 * call.computed
    else:  # `clock_limit` of `enough` is three times as long
        spent, most = f"{call.seconds:.1f} s by the clock", clock_limit(limit)
        enough = max(0.3 * call.seconds, 3 * call.seconds - 60)
    found = f"{config.function!r} {done} {spent} on {which}, and may take {most:g} s"
    more = f"slower verdicts are undecided; rewards.timeout={math.ceil(enough)} would allow more"
    return Problem(PLACE, found, more)


def _slow(config: RewardsConfig, calls: Sequence[_Call], completions: int) -> Iterator[str]:
    """Yield a warning if the verdicts of a step's `completions` take more than 10 seconds, by those of `calls`."""
    known = [call.seconds for call in calls if call.verdict.outcome is not Outcome.UNDECIDED]
    if known and (whole := median(known) * completions / config.workers) > _PATIENCE:
        yield (
            f"the reward {config.function!r} took {median(known):.1f} s for a completion: the {completions} of a step "
            f"take {whole:,.0f} s of {several(config.workers, 'worker')} (rewards.workers)"
        )


def _wrong(config: RewardsConfig, wrong: Sequence[_Call], count: int) -> Problem:
    shown = wrong[0].question
    found = (
        f"{config.function!r} finds {len(wrong)} of the first {count} gold answers wrong, judged as completions: "
        f"{shown.answer[-60:]!r} of {place_of(shown)}"
    )
    return Problem(PLACE, found, "the gold answers must have the form that the reward reads (docs/how_to/rewards.md)")


def _beyond(config: RewardsConfig, calls: Sequence[_Call]) -> Iterator[str]:
    """Yield a warning if a reward lies outside of `rewards.wrong` to `rewards.right`: accuracy is measured by the
    middle of these two."""
    rewards = [call.verdict.reward for call in calls if call.verdict.reward is not None]
    strange = [one for one in rewards if not config.wrong <= one <= config.right]
    if strange:
        middle = (config.wrong + config.right) / 2
        yield (
            f"the reward {config.function!r} gave {strange[0]:g}; for accuracy and filters a completion is right above "
            f"{middle:g}, the middle of rewards.wrong and rewards.right: set these to the ends of its range"
        )


def _differing(config: RewardsConfig, first: Sequence[_Call], second: Sequence[_Call]) -> list[str]:
    return [
        f"the reward {config.function!r} judges one completion of {place_of(one.question)} in two ways: "
        f"{_shown(one.verdict)}, then {_shown(other.verdict)}"
        for one, other in zip(first, second, strict=False)
        if one.verdict != other.verdict
    ]


def _shown(verdict: Verdict) -> str:
    return verdict.reason or f"{verdict.outcome.value} ({verdict.reward:g})"
