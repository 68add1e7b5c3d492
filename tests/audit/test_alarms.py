"""Promises: each alarm is silent in a healthy run, and holds, since the right step, in a run that is ill in its
one way; what has passed is no alarm.
"""

import pickle
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt
import pytest

from stretto.store.series.lines import LineFollower
from stretto.store.series.metrics import METRICS, EvaluationLine, MetricsLog, StepMetrics, rewind_metrics
from stretto_report.audit.alarms import CHECKS, AlarmWatch, findings_of, mismatch_of
from stretto_report.audit.evidence import KEPT, RECENT, WINDOW, Alarm, Disk, Evidence, fallen, kept
from tests.store.lines import evaluation_line, step_line

N = 60
GIB = 1 << 30


def _evidence(
    evaluations: Sequence[EvaluationLine] = (), bound: float | None = 4.0, disk: Disk | None = None, **changed: object
) -> Evidence:
    """A healthy run of 60 steps of 2 s; `changed` series in place of its own (a point is written as __)."""
    series = {
        "reward": np.linspace(0.2, 0.8, N),
        "length_mean": np.full(N, 100.0),
        "staleness_mean": np.full(N, 1.0),
        "rl_seconds": 2.0 * np.arange(1, N + 1),
        "trainer.entropy": np.full(N, 1.0),
        "trainer.behavior_logprob_error": np.full(N, 1e-3),
        "busy.trainer": np.full(N, 0.5),
        "busy.engine-0": np.full(N, 0.9),
    }
    series |= {name.replace("__", "."): np.asarray(values, float) for name, values in changed.items()}
    return Evidence(np.arange(1, N + 1), series, evaluations, bound, disk, last_step=120)


def _from(place: int, before: float, after: float) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """One value in the steps up to `place`, another behind."""
    return np.where(np.arange(1, N + 1) <= place, before, after)


STALE = _from(20, 1.0, 4.0)


def _evaluation(step: int, accuracy: float, **further: int) -> EvaluationLine:
    """Of 500 completions."""
    return evaluation_line(step, accuracy, prompts=500, ci95=(accuracy - 0.04, accuracy + 0.04), **further)


def _few(step: int, right: int, **further: int) -> EvaluationLine:
    """Of four questions."""
    return evaluation_line(step, right / 4, prompts=4, **further)


LEAKS = np.arange(400)


def _memory(values: npt.ArrayLike) -> Evidence:
    """A run of 400 steps whose trainer has this much memory."""
    return Evidence(np.arange(1, 401), {"memory.trainer": np.asarray(values, np.float64)})


def _named(found: Evidence) -> list[tuple[str, int]]:
    return [(alarm.name, alarm.first_step) for alarm in findings_of(found).alarms]


def test_a_healthy_run_has_no_alarm() -> None:
    rising = [_evaluation(0, 0.2), _evaluation(30, 0.5), _evaluation(60, 0.48)]
    assert _named(_evidence(rising, disk=Disk(free=100 * GIB, written=GIB))) == []


@pytest.mark.parametrize(
    ("found", "name", "since"),
    [
        # ten steps of 1.0, then 0.1: a window with k of the latter has mean 1 - 0.09 k, below 0.2 from k = 9 on
        (_evidence(trainer__entropy=_from(40, 1.0, 0.1)), "entropy_collapse", 49),
        # 100 + 30 k > 300 from k = 7 on
        (_evidence(length_mean=_from(40, 100.0, 400.0)), "length_explosion", 47),
        # 0.001 + 0.0019 k > 0.01 from k = 5 on
        (_evidence(trainer__behavior_logprob_error=_from(40, 1e-3, 2e-2)), "mismatch", 45),
        # 0.05 + 0.055 k >= 0.25, and more than three times 0.05, from k = 4 on
        (_evidence(canary__one=_from(40, 0.05, 0.6)), "canary_drifting", 44),
        # half of the tolerance from the first window on: whatever it was in the beginning
        (_evidence(canary__one=np.full(N, 0.5)), "canary_drifting", 10),
        (_evidence(canary__one=np.full(N, 0.1), canary__other=_from(40, 0.1, 1.0)), "canary_drifting", 43),
        # 0.06 k >= 0.25 from k = 5 on
        (_evidence(undecided=_from(40, 0.0, 0.6)), "undecided", 45),
        # training has not measured ten steps
        (_evidence([_evaluation(60, 0.5, undecided=125)], undecided=_from(9, 0.6, np.nan)), "undecided", 60),
        (_evidence(busy__trainer=_from(40, 0.5, 0.0)), "idle_role", 41),
        # 1 + 0.3 k >= 3.6 from k = 9 on
        (_evidence(staleness_mean=STALE), "staleness_at_bound", 29),
        # 1 + 0.3 k >= 0.9 * 2 from k = 3 on: the bound is 2 in the end, whatever it was, and was in the recipe
        (_evidence(bound=None, staleness_mean=STALE, max_staleness=_from(9, 8, 2)), "staleness_at_bound", 23),
        (_evidence(staleness_mean=STALE, max_staleness=_from(59, 2, np.nan)), "staleness_at_bound", 23),
        (_evidence([_evaluation(*at) for at in ((10, 0.6), (30, 0.59), (60, 0.45))]), "reward_without_accuracy", 60),
        # 3 GiB in 60 steps: the 60 that are left write 3 GiB more
        (_evidence(disk=Disk(free=2 * GIB, written=3 * GIB)), "disk_filling", 60),
        (_evidence(disk=Disk(free=GIB // 2, written=1)), "disk_filling", 60),
    ],
)
def test_an_alarm_holds_since_its_step(found: Evidence, name: str, since: int) -> None:
    assert _named(found) == [(name, since)]


@pytest.mark.parametrize(
    "found",
    [
        _evidence(trainer__entropy=np.where(np.arange(N) // 20 == 1, 0.05, 1.0)),  # it was low, and is not any more
        _evidence(length_mean=np.where(np.arange(N) == 30, 5_000.0, 100.0)),  # one strange step
        _evidence(trainer__behavior_logprob_error=_from(40, 1e-7, 1e-5)),  # far apart in proportion, and still nothing
        _evidence(canary__one=np.full(N, 0.3)),  # more than a quarter of the tolerance, and always was
        _evidence(canary__one=_from(40, 0.01, 0.2)),  # twenty times as far, and still far from the tolerance
        _evidence(canary__one=np.where(np.arange(N) // 20 == 1, 0.9, 0.05)),  # it has come back
        _evidence(undecided=np.full(N, 0.2)),
        _evidence(
            [_evaluation(60, 0.5, undecided=400)], undecided=np.full(N, 0.0)
        ),  # training decides, where it is measured
        _evidence([_evaluation(60, 0.5, undecided=124)]),
        _evidence([_few(60, 1, undecided=3)]),  # of four questions
        _evidence(trainer__entropy=np.full(N, np.nan)),  # it is not measured
        _evidence(busy__trainer=_from(40, 0.5, np.nan)),
        _evidence(bound=None, staleness_mean=np.full(N, 50.0)),
        _evidence(staleness_mean=np.full(N, 4.0), max_staleness=_from(40, 4, 8)),  # the bound was raised
        _evidence(bound=0.0, staleness_mean=np.zeros(N)),  # a synchronous run
        _evidence(staleness_mean=STALE, busy__trainer=np.full(N, 0.7)),  # more completions would not make it quicker
        # by a sixth, by chance
        _evidence([_evaluation(30, 0.6), _evaluation(60, 0.5)], reward=np.linspace(0.8, 0.2, N)),
        _evidence(busy__rewards=np.zeros(N)),  # agents bring their own rewards
        _evidence([_few(0, 3), _few(1, 4), _few(2, 2)]),  # of four questions
        _evidence(busy__trainer=_from(40, 0.5, 0.0), rl_seconds=np.linspace(0, 1, N)),  # steps of milliseconds
        Evidence(np.arange(0), {}),
        Evidence(np.arange(1, WINDOW), {"staleness_mean": np.full(WINDOW - 1, 4.0)}, bound=4.0),
    ],
)
def test_what_has_passed_is_too_little_or_not_measured_is_no_alarm(found: Evidence) -> None:
    assert _named(found) == []


def _of_float32(values: npt.ArrayLike, mismatch: float = 1e-3) -> Evidence:
    return Evidence(np.arange(1, N + 1), {MEASURED: np.asarray(values, np.float64)}, mismatch=mismatch)


MEASURED = "trainer.behavior_logprob_error"
RARELY = np.where(np.arange(1, N + 1) % 20 == 0, 2e-3, np.nan)  # in steps 20, 40 and 60


@pytest.mark.parametrize(
    ("found", "since"),
    [
        (_of_float32(_from(58, 1e-7, 2e-3)), [59]),
        (_of_float32(np.full(N, 2e-3)), [1]),  # from the first step on: the beginning of the run is no measure
        (_of_float32(RARELY), [20]),  # most steps have no tokens of the version in training
        (_of_float32(_from(59, 1e-7, 2e-3)), []),  # one step
        (_of_float32(np.where(np.arange(N) == 58, 1e-7, 2e-3)), []),  # not two, one after the other, in the end
        (_of_float32(np.full(N, 1e-3)), []),
        (_of_float32(np.full(N, 2e-3), 0.1), []),  # bfloat16 rounds by more
        (_of_float32(_from(58, 1e-3, 0.2), 0.1), [59]),
        (_of_float32([2e-3] + [np.nan] * (N - 1)), []),
    ],
)
def test_two_measured_steps_beyond_what_the_type_rounds_by_are_a_mismatch(found: Evidence, since: list[int]) -> None:
    assert _named(found) == [("mismatch", step) for step in since]


@pytest.mark.parametrize(
    ("recipe", "nats"),
    [
        ({}, 1e-3),
        ({"engine": {"dtype": "float32"}, "trainer": {"steps": 3}}, 1e-3),
        ({"engine": {"dtype": "bfloat16"}}, 0.1),
        ({"trainer": {"dtype": "bfloat16"}}, 0.1),
        ({"engine": {"dtype": "float16"}, "trainer": 3}, 0.1),
    ],
)
def test_what_rounding_may_come_to_follows_from_the_types_of_both(recipe: dict[str, object], nats: float) -> None:
    assert mismatch_of(recipe) == nats


def test_a_drift_names_the_engine_and_both_distances() -> None:
    (alarm,) = findings_of(_evidence(canary__one=_from(40, 0.05, 0.6))).alarms
    assert alarm.message == "one was at 5% of what it may be from the trainer, and is at 60%"
    assert alarm.look == "series:canary.one"


@pytest.mark.parametrize(
    ("memory", "since"),
    [
        # 1 MiB a step: the first window of the last 160 steps ends with step 250
        (500.0 + LEAKS, [250]),
        # from step 101 on: of the last 320 steps two quarters are flat, of the last 160 none
        (500.0 + np.maximum(LEAKS - 100, 0), [250]),
        (500.0 + 50 * (LEAKS % 2) + LEAKS, [250]),  # it swings by a tenth, and leaks all the same
        # 0.2 MiB a step: 30 MiB in 150 steps are too few, 62 in 310 too
        (500.0 + 0.2 * LEAKS, []),
        (10_000.0 + LEAKS, []),  # less than a tenth
        (500.0 + 300 * (1 - np.exp(-LEAKS / 80)), []),  # caches that fill
        (500.0 + 300 * (LEAKS > 350), []),  # one jump
        (np.where(LEAKS < 390, 500.0 + LEAKS, 500.0), []),  # it was freed
    ],
)
def test_memory_that_goes_on_growing_is_an_alarm_a_full_cache_is_none(memory: npt.ArrayLike, since: list[int]) -> None:
    assert _named(_memory(memory)) == [("memory_growing", step) for step in since]


def test_an_alarm_of_memory_names_the_role_and_its_pace() -> None:
    (alarm,) = findings_of(_memory(500.0 + LEAKS)).alarms
    assert alarm.title == "memory of trainer growing"
    assert alarm.message == "it grew from 744 to 894 MiB by step 400, 1 MiB a step"
    assert alarm.look == "series:memory.trainer"


def test_completions_that_are_cut_off_name_the_key_that_allows_more() -> None:
    (alarm,) = findings_of(_evidence(truncated=np.full(N, 0.98))).alarms
    assert str(alarm).endswith("98% of the completions end at their limit of tokens; see recipe:sampling.max_tokens")


def test_an_alarm_says_the_numbers_and_where_to_look() -> None:
    (alarm,) = findings_of(_evidence(length_mean=_from(40, 100.0, 400.0))).alarms
    message = "completions grew from 100 to 400 tokens"
    assert alarm == Alarm("length_explosion", "length explosion", 47, message, "series:length_mean")


def test_an_alarm_of_undecided_completions_names_the_most_frequent_reason_live_and_afterwards(tmp_path: Path) -> None:
    why = "the reward raised KeyError in my_reward.py:7: 'level'"
    lines = [step_line(step, undecided=0.5, undecided_reason=why) for step in range(1, 21)]
    live = AlarmWatch(tmp_path, {"rollout": {"max_staleness": 4.0}, "trainer": {"steps": 20}})
    for line in lines:
        live.step(line)
    told = f"50% of the completions have no verdict and are not trained on, most often: {why}"
    for alarms in (live.alarms(), findings_of(Evidence.of(lines)).alarms):
        assert [alarm.message for alarm in alarms if alarm.name == "undecided"] == [told]


@pytest.mark.parametrize(
    ("config", "dtype", "nats"),
    [
        ('{"num_experts": 8}', "bfloat16", 0.3),
        ('{"text_config": {"n_routed_experts": 64}}', "float16", 0.3),
        ('{"num_local_experts": 4}', "float32", 1e-3),
        ('{"num_experts": null}', "bfloat16", 0.1),
        ("[1", "bfloat16", 0.1),
    ],
)
def test_in_a_half_precision_mixture_rounding_may_be_more(tmp_path: Path, config: str, dtype: str, nats: float) -> None:
    (tmp_path / "config.json").write_text(config)
    recipe = {"model": {"path": str(tmp_path)}, "engine": {"dtype": dtype}}
    assert mismatch_of(recipe) == pytest.approx(nats)
    assert mismatch_of(recipe | {"model": {"path": str(tmp_path / "gone")}}) == min(nats, 0.1)


LONG = 20_000


def _long(series: str, values: npt.ArrayLike) -> Evidence:
    """A run of 20,000 steps that swings."""
    swing = np.random.default_rng(7).normal(1, 0.1, LONG)
    clock = {"rl_seconds": 2.0 * np.arange(1, LONG + 1), "reward": np.linspace(0.2, 0.8, LONG) * swing}
    found = {name: _numbers(one) for name, one in (clock | {series: np.asarray(values) * swing}).items()}
    return Evidence(np.arange(1, LONG + 1), found, bound=4.0)


def _numbers(values: npt.ArrayLike) -> npt.NDArray[np.float64]:
    return np.asarray(values, np.float64)


BEHIND = np.arange(LONG) >= LONG - 900
RARE = np.where(np.arange(LONG) % 97 == 0, 1.0, np.nan)  # of which no block may lose the only measurement


@pytest.mark.parametrize(
    ("series", "values"),
    [
        ("trainer.entropy", np.where(BEHIND, 0.1, 1.0)),
        ("length_mean", np.where(BEHIND, 400.0, 100.0)),
        ("length_mean", np.where(np.arange(LONG) < 20, 100.0, 400.0)),
        ("accuracy", np.where(BEHIND, 0.1, 0.6)),
        ("staleness_mean", np.where(BEHIND, 5.0, 1.0)),
        ("canary.one", np.where(BEHIND, 0.9, 0.01) * RARE),
        ("trainer.grad_norm", np.where(BEHIND, 0.0, 1.0)),
        ("busy.engine-0", np.where(BEHIND, 0.0, 0.9)),
        ("trainer.behavior_logprob_error", np.where(BEHIND, 0.2, 1e-3)),
        ("accuracy", np.full(LONG, 0.6)),
        ("busy.engine-0", np.full(LONG, 0.9)),
    ],
)
@pytest.mark.parametrize("before", [0, 100_000], ids=["a run", "a branch"])
def test_a_long_run_has_the_alarms_of_all_its_steps(series: str, values: npt.ArrayLike, before: int) -> None:
    found = replace(long := _long(series, values), steps=long.steps + before)
    assert len(found.thinned().steps) < 6_500
    assert _named(found) == [(alarm.name, alarm.first_step) for check in CHECKS for alarm in check.alarms(found)]


def test_a_role_is_idle_in_steps_that_became_one_row_only_if_it_is_in_each_of_them() -> None:
    ((name, since),) = _named(_long("busy.engine-0", np.where(np.arange(1, LONG + 1) == 10_003, 0.9, 0.0)))
    assert name == "idle_role"
    assert 10_003 < since <= 10_011


def test_a_leak_that_only_a_long_run_shows_is_an_alarm() -> None:
    leaks = Evidence(np.arange(1, LONG + 1), {"memory.trainer": _numbers(500.0 + 0.01 * np.arange(LONG))})
    assert _named(leaks)[0][0] == "memory_growing"


def test_what_is_kept_of_a_run_does_not_grow_with_its_steps_and_is_that_of_all_of_them(tmp_path: Path) -> None:
    live, sizes, lines = AlarmWatch(tmp_path, {}), list[int](), list[StepMetrics]()
    evaluations = [_evaluation(step, 0.5 - step / 50_000 + step % 7 / 100) for step in range(0, LONG, 2)]
    for step in range(1, LONG + 1):
        some = {"engine-0": step / LONG} if step % 97 == 0 else {}
        lines.append(step_line(step, accuracy=0.5 + 0.4 * (step % 7 == 0), canary=some, memory={"trainer": 500.0}))
        live.step(lines[-1])
        if step % 2:
            live.evaluated(evaluations[step // 2])
        sizes.append(len(pickle.dumps(live)) if step % 1000 == 0 else 0)
    assert max(sizes[8_000:]) < 1.1 * max(sizes[:8_000])
    found = replace(Evidence.of(lines), evaluations=evaluations)
    assert live.findings() == findings_of(found)
    fell, kept = fallen(evaluations), fallen((thinned := found.thinned()).evaluations, thinned.left_out)
    assert fell is not None
    assert kept is not None
    assert kept[0] == fell[0]
    assert 0 <= kept[1].step - fell[1].step <= 16  # the best of a block is kept, and of two blocks it may be well


def _known(watch: AlarmWatch) -> tuple[object, ...]:
    found = watch._evidence()
    series = {name: values.tobytes() for name, values in found.series.items()}
    return list(found.steps), series, list(found.evaluations), found.left_out


def test_a_resume_reads_no_step_that_its_alarms_remember(tmp_path: Path) -> None:
    path, count = tmp_path / "metrics.jsonl", 3 * RECENT + 9
    log, live = MetricsLog(path), AlarmWatch(tmp_path, {})
    live.recall(0)
    for step in range(1, count + 1):
        line = step_line(step, accuracy=0.9 if step < 3_000 else 0.1, busy={"engine-0": step % 7 / 7})
        log.append(line)
        live.step(line)
        if step % 500 == 0:
            log.append(evaluation := _evaluation(step, 0.9 - step / 10_000))
            live.evaluated(evaluation)
    log.append(step_line(count + 1, accuracy=0.5))  # done again
    assert live.alarms()
    for damaged in (False, True):
        if damaged:
            path.write_bytes(path.read_bytes().replace(b'"step":2000', b'"step":****', 1))
        resumed = AlarmWatch(tmp_path, {})
        resumed.recall(count)
        assert _known(resumed) == _known(live)
    (looked := AlarmWatch(tmp_path, {})).read(LineFollower(path, METRICS))
    assert list(looked._evidence().steps)[-2:] == [count, count + 1]
    (begun := AlarmWatch(tmp_path, {})).recall(1_000)
    assert list(begun._evidence().steps) == [*range(1, 1_001)], "what is remembered is of later steps"
    fields: list[object] = msgspec.msgpack.decode((tmp_path / KEPT).read_bytes())
    shorter = [
        {name: one[:-8] for name, one in field.items()} if isinstance(field, dict) else field for field in fields
    ]
    (tmp_path / "other").write_bytes(msgspec.msgpack.encode(shorter))
    assert kept(tmp_path / KEPT, LineFollower(path, METRICS), count) is not None
    assert kept(tmp_path / "other", LineFollower(path, METRICS), count) is None
    rewind_metrics(path, 3_000)
    (anew := AlarmWatch(tmp_path, {})).recall(count)
    assert list(anew._evidence().steps) == [step for step in range(1, 3_001) if step != 2_000]
    (tmp_path / KEPT).write_bytes(b"torn")
    AlarmWatch(tmp_path, {}).recall(count)
