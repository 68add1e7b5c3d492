"""Predict layouts: run the real controller on a virtual clock, with the costs of a machine."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import wait
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace

import msgspec

from stretto.core.errors import Problem, RecipeError
from stretto.core.events import Span
from stretto.core.records import Record
from stretto.core.tasks import in_daemon_thread
from stretto.doors.loading import is_own
from stretto.rollout.config import PACINGS
from stretto.rollout.pacing import Pacing, pacing_of
from stretto_foresight.planner.costs import Costs, Job, Layout
from stretto_foresight.planner.layouts import candidate, candidates, fitting_own_layout
from stretto_foresight.planner.lengths import Lengths
from stretto_foresight.planner.machine import MachineProfile, known_machines
from stretto_foresight.simulator.accounts import SimulationReport
from stretto_foresight.simulator.engines import EngineLimits
from stretto_foresight.simulator.run import SimulatedRun

_GRAINS = 48  # simulated tokens of a completion of mean length
_TRAJECTORIES = 12_000  # trajectories of one simulation, about
_STEPS = 9  # least steps of a simulation
_ROUNDS = 3  # iterations to find how much roles that share cores slow each other down
_SIMULATED = 6  # most candidates that are simulated
_PATIENCE = 30.0  # CPU seconds after which no simulation starts, and the current one ends early
_PACED, _POLL = 10.0, 0.5  # seconds for a call of a user's pacing, and between two looks at it
_DRAWN = 4  # training steps shown in a timeline
_SEED = 1  # of the lengths in a simulation
_BUSY = 0.9  # busy share of a role from which it counts as the bottleneck
_MOSTLY = 0.75  # share of fixed seconds in a role's work from which a profile says little about a model


class _Staleness(Record, frozen=True):
    """Mean and 99th percentile of the staleness of the tokens in the loss: versions from sampling to training."""

    mean: float
    p99: int


class LayoutPrediction(Record, frozen=True):
    """Prediction for one layout, as in `stretto plan --json`. `tensor`: devices of an engine. `busy`: busy share of
    each role, by its name in `stretto inspect`. `tokens_per_second` counts the tokens of trained completions, masked
    ones included. `hours`: of the whole run, start included; `device_hours`: times the devices. `memory_gib`: of the
    device that needs most; `memory`: by role. `max_staleness` (None: no bound) and `max_in_flight`: at the end.
    `masked`: share of the trained tokens. `recomputed`: tokens per sampled token. `waits_for`: "generation", "judging"
    or "training". `terms`: seconds by role and work. `timeline`: spans of the trainer and one engine, last steps."""

    engines: int
    ranks: int
    step_seconds: float
    busy: Mapping[str, float]
    staleness: _Staleness
    tokens_per_second: float
    memory_gib: float  # of the device that needs most
    hours: float
    device_hours: float
    tensor: int
    micro_batch_tokens: int
    max_staleness: float | None  # at the end of the simulation; None: no bound
    max_in_flight: int  # at the end of the simulation
    memory: Mapping[str, float]  # GiB of a device: trainer, engine, cache
    masked: float  # share of the trained completions' tokens that are masked
    recomputed: float  # tokens recomputed per sampled token
    waits_for: str  # bottleneck of a step: generation, judging or training
    terms: Mapping[str, float]  # seconds of a step by role and kind of work, and values that they depend on
    timeline: tuple[Span, ...] = ()  # spans of the trainer and of one engine, over the last simulated steps


class RunPlan(Record, frozen=True):
    """Result of `stretto plan`. `layouts`: best first for the `goal`. `mean_length`: of a completion, in tokens.
    `recipe`: digest of the recipe if this is its own layout, else None (`plan` returns None)."""

    machine: str
    goal: str
    mean_length: float
    layouts: tuple[LayoutPrediction, ...]
    recipe: str | None = None  # digest of the recipe, if this is its own layout


@dataclass(frozen=True)
class Grained:
    """Lengths in simulated tokens, each of which stands for `grain` real tokens, for the simulator (`GroupLengths`). A
    simulated length is at least 1. `failure_rate`, `filter_rate`: shares of the groups that fail or are filtered."""

    lengths: Lengths
    grain: int
    failure_rate: float = 0.0
    filter_rate: float = 0.0

    @property
    def prompt_tokens(self) -> int:
        return self.lengths.prompt_tokens

    def groups(self, chance: random.Random, members: int) -> Iterator[tuple[int, ...]]:
        """Draw groups of `members` lengths without end, each length divided by the grain and rounded up or down at
        random so that the mean is kept."""
        drawn = self.lengths.groups(chance, members)
        if self.grain == 1:
            return drawn
        return (tuple([max(1, int(length / self.grain + chance.random())) for length in group]) for group in drawn)


def plan(
    job: Job,
    machine: MachineProfile,
    devices: int | None,
    goal: str = "time",
    say: Callable[[str], None] = lambda text: None,
    clock: Callable[[], float] = time.process_time,
) -> RunPlan:
    """Simulate layouts of `devices` devices and order them by the `goal` ("time", "cost" or "staleness"); None: predict
    the recipe's own layout only.

    `say` gets progress messages, and a warning if most of a step is time that a built-in profile assumes for any model.
    After 30 seconds of the `clock` (CPU seconds), no further simulation starts, and the current one ends after its
    step.

    Raises:
        RecipeError: no layout fits the memory, or no layout of these devices is possible.
    """
    start = clock()

    def over() -> bool:
        return clock() - start > _PATIENCE

    if devices is None:
        found = [predict(job, machine, fitting_own_layout(job, machine), over, say)]
    else:
        found = _search(job, machine, devices, goal, say, over)
    layouts = best_first(found, goal)
    if machine.name in known_machines():
        best = layouts[0]
        _tell_fixed(Costs(job, machine, Layout(best.engines, best.ranks, best.tensor)), best.busy, say)
    return RunPlan(machine.name, goal, round(job.lengths.mean, 1), tuple(layouts))


def _tell_fixed(costs: Costs, busy: Mapping[str, float], say: Callable[[str], None]) -> None:
    """Warn if three quarters of an engine's or the trainer's work, and with it half of a step, are the seconds that a
    profile assumes for any model. `busy`: busy share of each role."""
    machine, (of_decode, of_training) = costs.machine, costs.fixed_shares
    parts = {
        f"{machine.step_seconds:g} s of each decode step": (of_decode, busy["engine-0"]),
        f"{machine.train_seconds:g} s of each training step": (of_training, busy["trainer"]),
    }
    fixed = {words: share * at_work for words, (share, at_work) in parts.items() if share > _MOSTLY}
    if max(fixed.values(), default=0.0) > 1 / 2:
        say(
            f"warning: most of this is what the profile {machine.name} assumes for any model, {' and '.join(fixed)}: "
            "small models and batches probably take far less; `stretto plan --calibrate` on the machine measures it"
        )


def _search(
    job: Job, machine: MachineProfile, devices: int, goal: str, say: Callable[[str], None], over: Callable[[], bool]
) -> list[LayoutPrediction]:
    """Simulate the candidates in the order of their estimates, then the best one with other staleness bounds; return
    the distinct predictions. Candidates whose estimate is worse than a prediction are skipped. Once `over` returns
    True, no further one is started. `say` gets a line for each simulation."""
    chosen = _chosen(job, machine, devices, goal)
    found: list[tuple[LayoutPrediction, Costs]] = []

    def simulate(which: Sequence[Costs]) -> None:
        for number, one in enumerate(which, start=1):
            if found and not _may_win(one, [done for done, _ in found], goal):
                continue
            name = f"{one.layout.engines} x {one.layout.tensor} devices generate, {one.layout.ranks} train"
            if found and over():
                say(
                    f"{len(which) - number + 1} more layouts are not simulated, {_PATIENCE:.0f} s are over: {name}, ..."
                )
                return
            say(f"simulating {number} of {len(which)}: {name}, eta {one.job.rollout.max_staleness}")
            found.append((predict(one.job, machine, one.layout, over, say), one))

    simulate(chosen)
    best = best_first([done for done, _ in found], goal)[0]
    simulate(_other_bounds(next(one for done, one in found if done is best), machine, goal))
    return distinct([done for done, _ in found])


def _may_win(one: Costs, found: Sequence[LayoutPrediction], goal: str) -> bool:
    """Whether the optimistic estimate of a candidate is no worse than the best of the predictions `found` (at least
    one), in seconds of a step or, for the goal "cost", in device-seconds."""
    if goal == "cost":
        best = min(done.step_seconds * (done.engines * done.tensor + done.ranks) for done in found)
        return one.estimate * one.layout.devices <= best
    return one.estimate <= min(done.step_seconds for done in found)


def distinct(found: Sequence[LayoutPrediction]) -> list[LayoutPrediction]:
    """Return the predictions without each that has the layout and micro-batch size of an earlier one and nearly its
    staleness and step time: another staleness bound made no difference."""
    kept: list[LayoutPrediction] = []
    for one in found:
        if not any(_alike(one, other) for other in kept):
            kept.append(one)
    return kept


def _alike(one: LayoutPrediction, other: LayoutPrediction) -> bool:
    same = all(
        getattr(one, name) == getattr(other, name) for name in ("engines", "ranks", "tensor", "micro_batch_tokens")
    )
    shown = one.staleness.p99 == other.staleness.p99 and abs(one.staleness.mean - other.staleness.mean) < 0.05
    return same and shown and math.isclose(one.step_seconds, other.step_seconds, rel_tol=5e-3)


def best_first(found: Sequence[LayoutPrediction], goal: str) -> list[LayoutPrediction]:
    """Return the predictions ordered by the goal: "time" by hours, "cost" by device-hours, "staleness" by mean
    staleness for those that take at most a tenth longer than the fastest; the others follow."""
    if goal == "cost":
        return sorted(found, key=lambda one: one.device_hours)
    if goal == "staleness":
        bound = 1.1 * min(one.hours for one in found)
        return sorted(found, key=lambda one: (one.hours > bound, one.staleness.mean, one.hours))
    return sorted(found, key=lambda one: one.hours)


def _chosen(job: Job, machine: MachineProfile, devices: int, goal: str) -> list[Costs]:
    """Return the candidate with the lowest estimate of each layout, best first, at most six. For the goal "cost",
    halves of the devices are tried too, down to two, where their memory suffices. Raises RecipeError if no layout of
    all devices is possible."""
    chosen: dict[Layout, Costs] = {}
    fewer = range(1, devices.bit_length() - 1) if goal == "cost" else ()
    for number in (devices, *(devices >> power for power in fewer)):
        with suppress(RecipeError) if number < devices else nullcontext():  # fewer may have too little memory
            for one in candidates(job, machine, number):
                chosen.setdefault(one.layout, one)

    by_goal = sorted(chosen.values(), key=lambda one: one.estimate * (one.layout.devices if goal == "cost" else 1))
    return by_goal[:_SIMULATED]


def _other_bounds(first: Costs, machine: MachineProfile, goal: str) -> list[Costs]:
    """Return the costs of the layout of `first` with half and twice its staleness bound, and for the goal "staleness"
    with the bounds 1 and 2. Empty if its bound is "auto", 0 or infinite."""
    job, bound = first.job, first.job.rollout.max_staleness
    if not isinstance(bound, float | int) or not bound or math.isinf(bound):  # no bound, or "auto", which finds its own
        return []
    others = {bound * 2, bound // 2} | ({1.0, 2.0} if goal == "staleness" else set())
    tokens = job.trainer.micro_batch_tokens
    return [candidate(job, machine, first.layout, eta, tokens) for eta in sorted(others - {bound, 0.0})]


def predict(
    job: Job,
    machine: MachineProfile,
    layout: Layout,
    over: Callable[[], bool] = lambda: False,
    say: Callable[[str], None] = lambda text: None,
) -> LayoutPrediction:
    """Simulate some steps of the run after a warm-up that fills its queues (a short run from its first to its last
    step), with random lengths (the same in each call), and return the prediction for this layout. Whether the layout
    fits the memory is not checked.

    Where roles share cores and the run is asynchronous, the simulation is repeated with the slowdown that it shows.
    Once `over` returns True, the warm-up ends, and the simulation as soon as it has one step after that; `say` gets a
    message if it has too few steps.
    """
    costs = Costs(job, machine, layout)
    grain = max(1, round(job.lengths.mean / _GRAINS))
    steps = min(job.trainer.steps, max(_STEPS, _TRAJECTORIES // job.completions))
    warm = 0 if steps == job.trainer.steps else steps // 3
    run = _simulated(job, costs, grain, steps, warm, over)
    for _ in range(_ROUNDS if machine.cores and job.rollout.staleness_bounds[1] else 0):
        if over():
            break
        costs = _sharing_cores(costs, run.report)
        run = _simulated(job, costs, grain, steps, warm, over)
    if run.report.steps < steps - warm:
        say(f"{_PATIENCE:.0f} s are over: this layout is judged by {run.report.steps} of {steps - warm} steps")
    return msgspec.structs.replace(_prediction(costs, run.report, grain), timeline=newest_steps(run.spans))


def newest_steps(spans: Sequence[Span]) -> tuple[Span, ...]:
    """Return the spans of the time of the last four training steps (of all, if fewer), ordered by start. That time goes
    from the end of the update before them, which is 0 in the result, to the end of the last update. A span that reaches
    beyond is cut off there."""
    ends = [0.0, *(span.end for span in spans if span.name == "update")]
    start = ends[max(0, len(ends) - 1 - _DRAWN)]
    return tuple(
        msgspec.structs.replace(span, start=max(0.0, span.start - start), end=min(span.end, ends[-1]) - start)
        for span in sorted(spans, key=lambda span: span.start)
        if span.end > start and span.start <= ends[-1]
    )


def _simulated(job: Job, costs: Costs, grain: int, steps: int, warm: int, over: Callable[[], bool]) -> SimulatedRun:
    rollout, engine = job.rollout, job.engine
    limits = EngineLimits(
        count=costs.layout.engines,
        slots=engine.slots,
        cache_tokens=costs.cache_tokens(),
        recompute=engine.on_update == "recompute",
        load_interval=engine.load_interval,
        grain=grain,
    )
    config = rollout.model_copy(update={"filter": "none", "success_rate_min": 0.0, "success_rate_max": 1.0})
    lengths = Grained(job.lengths, grain)

    def simulated(timed: Callable[[Pacing], Pacing]) -> SimulatedRun:
        run = SimulatedRun(
            config,
            lengths,
            steps,
            _SEED,
            durations=costs,
            limits=limits,
            pacing=timed(pacing_of(rollout, job.in_rounds)),
            warm=warm,
            judges=job.reward_workers,
        )
        run.run(over)
        return run

    name = rollout.pacing if isinstance(rollout.pacing, str) else rollout.pacing.kind
    return _timed(name, simulated) if is_own(name) else simulated(lambda pacing: pacing)


def _timed(name: str, simulate: Callable[[Callable[[Pacing], Pacing]], SimulatedRun]) -> SimulatedRun:
    """Call `simulate` in a thread of its own, with a function that times each call of the user's pacing `name`. Raises
    RecipeError once one takes more than 10 seconds; the thread is abandoned."""
    began = [time.monotonic()]  # when the pacing was last made or called; empty while the simulation goes on

    def timed(pacing: Pacing) -> Pacing:
        def opens(may_start: bool, in_flight: int) -> bool:
            began[:] = [time.monotonic()]
            found = pacing(may_start, in_flight)
            began.clear()
            return found

        began.clear()
        return opens

    work = in_daemon_thread(lambda: simulate(timed), "simulation")
    while not wait([work], _POLL).done:
        if time.monotonic() - max(began, default=math.inf) > _PACED:
            found, limit = f"{name!r} has not returned from a call in {_PACED:g} s", "it is called for each group"
            raise RecipeError([Problem(PACINGS.key, found, limit)])
    return work.result()


def _sharing_cores(costs: Costs, report: SimulationReport) -> Costs:
    """Return the costs with the slowdown of roles that are busy at the same time, by their busy shares in the report.
    Roles share cores if they have more threads than the machine has cores, and they share caches and memory."""
    machine, job, layout = costs.machine, costs.job, costs.layout
    conductor, working = (min(1.0, share) for share in _conducting_and_training(costs, report))
    engines = [(job.engine.threads, min(1.0, report.generating / report.seconds / layout.engines))] * layout.engines
    ranks = [(job.trainer.threads, working)] * layout.ranks

    def slower(threads: int, others: Sequence[tuple[int, float]]) -> float:
        beside = machine.beside * sum(share for _, share in others)
        return crowded(threads, [*others, (1, conductor)], machine.cores) * (1 + beside)

    generating = slower(job.engine.threads, engines[1:] + ranks)
    training = slower(job.trainer.threads, engines + ranks[1:])
    return replace(costs, slower_generation=generating, slower_training=training)


def crowded(threads: int, others: Sequence[tuple[int, float]], cores: float) -> float:
    """Return the factor by which a role with `threads` threads slows down on `cores` cores; 1: not at all. `others`:
    threads and busy share (0 to 1) of each other role. Roles are assumed to be busy independently of each other.

    Two cores, the role, a neighbour that is always busy and one that is busy a fifth of the time:

    >>> round(crowded(1, [(1, 1.0), (1, 0.2)], 2), 4)   # 1 / (0.8 + 0.2 * 2 / 3)
    1.0714
    """
    running = {threads: 1.0}  # probability of each number of running threads
    for own, share in others:
        grown: dict[int, float] = {}
        for count, chance in running.items():
            grown[count] = grown.get(count, 0.0) + chance * (1 - share)
            grown[count + own] = grown.get(count + own, 0.0) + chance * share
        running = grown
    return 1.0 / sum(chance * min(1.0, cores / count) for count, chance in running.items())


def _conducting_and_training(costs: Costs, report: SimulationReport) -> tuple[float, float]:
    """Return the busy shares of the conductor and of the trainer, whose simulated step begins with the conductor's work
    on the batch; that is not counted for the trainer."""
    completions = costs.job.completions * report.steps
    before = costs.slower_training * costs.machine.batch_seconds * completions
    return costs.machine.conduct_seconds * completions / report.seconds, (report.training - before) / report.seconds


def _serving(costs: Costs, report: SimulationReport) -> float:
    return costs.slower_generation * costs.machine.serve_seconds * report.completions.total()


def _terms(costs: Costs, report: SimulationReport, grain: int) -> dict[str, float]:
    """Return the terms of a step, named as in `dashboard.prediction`: seconds by role and work (mean over engines), and
    values that they depend on. `grain`: tokens per simulated token."""
    job, engines = costs.job, costs.layout.engines * report.steps
    parts = costs.training([round(job.lengths.prompt_tokens + job.lengths.mean)] * job.completions)
    trained = report.training / report.steps / sum(parts)
    step = report.seconds / report.steps
    working = trained * (sum(parts) - parts.conduct)
    completions = report.completions.total()
    generating = report.generating - _serving(costs, report)
    return {
        "step_seconds": step,
        "tokens_per_second": report.trained_tokens * grain / report.seconds,
        "completion_tokens": report.trained_tokens * grain / completions,
        "staleness": report.mean_staleness,
        "engines.generate": (generating - report.loading - report.recomputing) / engines,
        "engines.recompute": report.recomputing / engines,
        "engines.load": report.loading / engines,
        "engines.idle": max(0.0, step - generating / engines),
        "trainer.proximal": trained * parts.proximal,
        "trainer.update": trained * parts.update,
        "trainer.publish": trained * parts.publish,
        "trainer.idle": max(0.0, step - working),
        "rewards.score": report.judging / report.steps / job.reward_workers,
    }


def _prediction(costs: Costs, report: SimulationReport, grain: int) -> LayoutPrediction:
    job, layout, memory = costs.job, costs.layout, costs.memory()
    step_seconds = report.seconds / report.steps
    hours = (costs.machine.start_seconds + step_seconds * job.trainer.steps) / 3600
    generation = min(1.0, (report.generating - _serving(costs, report)) / report.seconds / layout.engines)
    conductor, training = _conducting_and_training(costs, report)
    judging = report.judging / report.seconds / job.reward_workers
    others = {"trainer": training, "rewards": judging}
    busy = {f"engine-{number}": round(generation, 4) for number in range(layout.engines)}
    bound = report.max_staleness
    return LayoutPrediction(
        engines=layout.engines,
        ranks=layout.ranks,
        step_seconds=step_seconds,
        busy=busy | {name: round(min(1.0, share), 4) for name, share in others.items()},
        staleness=_Staleness(round(report.mean_staleness, 3), report.staleness_quantile(0.99)),
        tokens_per_second=report.trained_tokens * grain / report.seconds,
        memory_gib=round(memory.most, 2),
        hours=hours,
        device_hours=hours * layout.devices,
        tensor=layout.tensor,
        micro_batch_tokens=job.trainer.micro_batch_tokens,
        max_staleness=None if math.isinf(bound) else bound,
        max_in_flight=report.max_in_flight,
        memory={"trainer": memory.trainer, "engine": memory.engine, "cache": memory.cache},
        masked=round(report.masked_share, 4),
        recomputed=round(report.recomputed / max(1.0, report.sampled), 4),
        waits_for="training" if training + conductor > _BUSY else "judging" if judging > _BUSY else "generation",
        terms=_terms(costs, report, grain),
    )
