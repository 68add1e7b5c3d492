"""Promises: a run that is destroyed raises the alarm of its kind, whatever its length, its noise and the scale of its
numbers, without any setting that may be off; healthy runs of the same generator raise none, and neither do the runs
that are committed. What nothing was measured for is said.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.store.series.metrics import EvaluationLine
from stretto_report.audit.alarms import CHECKS, findings_of, findings_of_run
from stretto_report.audit.evidence import WINDOW, Evidence, Numbers
from tests.store.lines import evaluation_line

ROOT = Path(__file__).parent.parent.parent
RUNS = sorted(path.parent for place in ("tests", "benchmarks") for path in (ROOT / place).rglob("metrics.jsonl"))


@dataclasses.dataclass(frozen=True)
class Made:
    """A made-up run: `begin` is the step from which a destroyed one is ill."""

    steps: int
    begin: int
    evidence: Evidence


@st.composite
def histories(draw: st.DrawFn) -> Made:
    """Healthy runs: they learn or stay as they are, with noise from batch to batch and evaluations now and then."""
    steps = draw(st.integers(4 * WINDOW, 40 * WINDOW))
    noise = np.random.default_rng(draw(st.integers(0, 2**32)))
    completions = draw(st.sampled_from([16, 64, 512]))
    first = draw(st.floats(0.1, 0.9))
    chance = np.linspace(first, draw(st.floats(first, 0.97)), steps)
    accuracy = noise.binomial(completions, chance) / completions
    scale, length = draw(st.floats(0.05, 5.0)), draw(st.floats(5.0, 4_000.0))
    norms = scale * np.exp(noise.normal(0, draw(st.floats(0.1, 1.0)), steps))
    norms[noise.random(steps) < draw(st.floats(0.0, 0.3))] = 0.0  # batches whose completions are all worth the same
    bad = np.zeros(steps)
    bad[noise.integers(steps)] = draw(st.sampled_from([0.0, 1.0]))  # one strange step
    series = {
        "accuracy": accuracy,
        "reward": draw(st.floats(0.5, 20.0)) * accuracy - draw(st.floats(0.0, 5.0)),
        "length_mean": length * np.linspace(1, draw(st.floats(0.3, 2.0)), steps) * noise.uniform(0.8, 1.2, steps),
        "truncated": noise.binomial(completions, draw(st.floats(0.0, 0.3)), steps) / completions,
        "trainer.grad_norm": norms,
        "trainer.bad_steps": bad,
        "trainer.kl_behavior": 10 ** noise.uniform(-7, -1, steps),
        "trainer.kl_reference": np.linspace(0, draw(st.floats(0.0, 0.5)), steps),
    }
    if draw(st.booleans()):
        del series["trainer.kl_reference"]
    prompts, every = draw(st.sampled_from([4, 32, 500])), draw(st.integers(5, steps))
    evaluations = [
        evaluation(step, noise.binomial(prompts, chance[max(step - 1, 0)]) / prompts, prompts)
        for step in range(0, steps + 1, every)
    ]
    evidence = Evidence(np.arange(1, steps + 1), series, evaluations if draw(st.booleans()) else ())
    return Made(steps, draw(st.integers(2 * WINDOW, steps - WINDOW)), evidence)


def evaluation(step: int, accuracy: float, prompts: int) -> EvaluationLine:
    return evaluation_line(step, accuracy, prompts=prompts, samples=prompts)


def ill(made: Made, series: Mapping[str, float]) -> Evidence:
    """The run with other values from its step `begin` on."""
    healthy, steps = made.evidence.series, np.arange(1, made.steps + 1)
    changed: dict[str, Numbers] = {
        name: np.where(steps < made.begin, healthy.get(name, np.zeros(made.steps)), value)
        for name, value in series.items()
    }
    return dataclasses.replace(made.evidence, series={**healthy, **changed})


def names(found: Evidence) -> set[str]:
    return {alarm.name for alarm in findings_of(found).alarms}


@settings(max_examples=100, derandomize=True)  # noise that looks for a false alarm would find one
@given(histories())
def test_a_healthy_run_raises_no_alarm(made: Made) -> None:
    assert names(made.evidence) == set()


#: What is destroyed in a run, by the alarm.
DESTROYED: dict[str, dict[str, st.SearchStrategy[float]]] = {
    "dead_gradient": {"trainer.grad_norm": st.floats(0.0, 1e-6), "accuracy": st.just(0.0)},
    "exploding_gradient": {"trainer.grad_norm": st.floats(1e4, 1e9)},
    "policy_apart": {"trainer.kl_behavior": st.floats(5.0, 100.0)},
    "policy_apart from its reference": {"trainer.kl_reference": st.floats(5.0, 100.0)},
    "bad_steps": {"trainer.bad_steps": st.integers(1, 8)},
    "truncated": {"truncated": st.floats(0.6, 1.0), "accuracy": st.just(0.1)},
}


@pytest.mark.parametrize("what", DESTROYED)
@given(made=histories(), data=st.data())
def test_a_run_that_is_destroyed_raises_its_alarm(what: str, made: Made, data: st.DataObject) -> None:
    found = ill(made, data.draw(st.fixed_dictionaries(DESTROYED[what])))
    assert what.split()[0] in names(found)


@given(histories(), st.sampled_from([64, 500]))
def test_accuracy_and_reward_that_fall_together_are_an_alarm(made: Made, prompts: int) -> None:
    fallen = ill(made, {"accuracy": 0.0, "reward": float(np.min(made.evidence.series["reward"]))})
    evaluations = [evaluation(0, 0.6, prompts), evaluation(made.begin - 1, 0.9, prompts)]
    evaluations.append(evaluation(made.steps, 0.05, prompts))
    assert "accuracy_falling" in names(dataclasses.replace(fallen, evaluations=evaluations))


def test_without_held_out_questions_the_completions_of_the_training_say_it() -> None:
    accuracy = np.where(np.arange(60) < 30, 0.8, 0.1) + 0.02 * (np.arange(60) % 2)
    found = Evidence(np.arange(1, 61), {"accuracy": accuracy, "reward": accuracy})
    assert names(found) == {"accuracy_falling"}
    # the questions have become harder, and not the policy worse
    later = [evaluation(0, 0.8, 500), evaluation(60, 0.8, 500)]
    assert names(dataclasses.replace(found, evaluations=later)) == set()


@pytest.mark.parametrize(("prompts", "best"), [(16, 0.75), (32, 0.5), (64, 0.3)])
def test_a_fall_that_lasts_stays_an_alarm_until_the_end(prompts: int, best: float) -> None:
    told = [
        [
            (alarm.name, alarm.first_step, alarm.message.split(",")[0])
            for alarm in findings_of(Evidence(np.arange(1, 10 * zeros + 1), {}, evaluations)).alarms
        ]
        for zeros in range(1, 60)
        for evaluations in [[evaluation(10 * i, 0.0 if i else best, prompts) for i in range(zeros + 1)]]
    ]
    fired = next(place for place, alarms in enumerate(told) if alarms)
    fell = f"the held-out accuracy fell from {best:.1%} (step 0) to 0.0%"
    assert fired < 3
    assert all(alarms == [("accuracy_falling", 10, fell)] for alarms in told[fired:])


def test_an_evaluation_of_zero_does_not_silence_completions_that_are_no_longer_right() -> None:
    accuracy = np.where(np.arange(60) < 30, 0.8, 0.0)
    few = [evaluation(step, share, 8) for step, share in ((0, 0.0), (20, 0.125), (60, 0.0))]
    for evaluations in ([], few[-1:], few):
        (alarm,) = findings_of(Evidence(np.arange(1, 61), {"accuracy": accuracy}, evaluations)).alarms
        assert (alarm.name, alarm.first_step) == ("accuracy_falling", 36)
        assert alarm.message == "80.0% of the completions were right, and 0.0% are"


def test_an_accuracy_that_falls_while_the_reward_rises_is_the_other_alarm() -> None:
    reward = np.linspace(0.0, 1.0, 60)
    falling = [evaluation(10, 0.9, 500), evaluation(60, 0.1, 500)]
    assert names(Evidence(np.arange(1, 61), {"reward": reward}, falling)) == {"reward_without_accuracy"}
    assert names(Evidence(np.arange(1, 61), {"reward": reward[::-1]}, falling)) == {"accuracy_falling"}


def test_gradients_of_zero_where_all_is_solved_are_no_alarm() -> None:
    found = Evidence(np.arange(1, 41), {"trainer.grad_norm": np.zeros(40), "accuracy": np.ones(40)})
    assert names(found) == set()
    assert names(dataclasses.replace(found, series={"trainer.grad_norm": np.zeros(40)})) == {"dead_gradient"}


@given(histories(), st.integers(0, WINDOW - 1), st.floats(1e3, 1e12))
def test_one_spike_at_the_beginning_makes_no_gradient_dead(made: Made, place: int, spike: float) -> None:
    norms = made.evidence.series["trainer.grad_norm"].copy()
    norms[place] *= spike
    norms[-WINDOW:] = np.maximum(norms[-WINDOW:], np.median(norms[norms > 0]))
    found = dataclasses.replace(made.evidence, series={**made.evidence.series, "trainer.grad_norm": norms})
    assert "dead_gradient" not in names(found)


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.name)
def test_the_committed_runs_raise_none(run: Path) -> None:
    assert findings_of_run(run).alarms == []
    assert {"synchronous_run", "watch_run"} <= {run.name for run in RUNS}


def test_what_is_not_measured_is_said_and_is_not_called_well() -> None:
    steps = np.arange(1, 31)
    nothing = findings_of(Evidence(np.arange(0), {}))
    assert (nothing.checks, len(nothing.not_measured)) == (len(CHECKS), len(CHECKS) - 1)  # the disk is always looked at
    some = findings_of(Evidence(steps, {"trainer.grad_norm": np.ones(30), "length_mean": np.ones(30)}))
    assert {"dead gradient", "exploding gradient", "length explosion"}.isdisjoint(some.not_measured)
    assert "entropy collapse" in some.not_measured
    told = f"none of {len(CHECKS)} alarms fired, {len(CHECKS) - 4} not measured: accuracy falling, "
    assert str(some).startswith(told)
    dead = findings_of(Evidence(steps, {"trainer.grad_norm": np.zeros(30)}))
    assert str(dead).startswith(f"1 of {len(CHECKS)} alarms fired, ")
