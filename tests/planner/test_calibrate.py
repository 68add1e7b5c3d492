"""Promises of a calibration:

- what a machine of known numbers would have taken gives these numbers back, whatever the shapes;
- no number is negative, and what costs nothing has a rate of its own;
- a measured shape gives samples of every kind, and they make a machine;
- a publication is counted once;
- a file that is there stays until it is replaced by a whole measurement; a run that does not end is an error;
- the record is in the middle of what roles took alone and in a run, and roles that slow each other down are found out;
- between two steps the conductor takes what it takes where the next batch is complete;
- what of a synchronous run is neither generation, training nor the conductor's work is the engine's server's."""

import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import msgspec
import pytest
from torch import Tensor

from stretto.core.errors import RoleDied
from stretto.core.events import Span
from stretto.engine.config import EngineConfig
from stretto.model.hf.shape import ModelShape
from stretto.rollout.config import RolloutConfig
from stretto.store.inspection import Inspection, StalenessSummary, TokenCounts, TrajectoryCounts, WeightsSummary
from stretto.store.run_folder import RunFolder
from stretto.store.series.lines import SpanLog
from stretto.trainer.config import TrainerConfig
from stretto.weights.mailbox import Gather, Publication, as_it_is
from stretto.weights.shared_memory import SharedMemoryPublisher
from stretto_app.extensions.commands import calibrate as calibrating
from stretto_app.extensions.commands.calibrate import between_roles, between_steps
from stretto_foresight.planner import measure
from stretto_foresight.planner.costs import Costs, Job, Layout
from stretto_foresight.planner.fit import (
    DecodeSample,
    LoadSample,
    PrefillSample,
    RunPair,
    RunSample,
    TrainSample,
    fit_decode,
    fit_loads,
    fit_prefill,
    fit_runs,
    fit_training,
    least_squares,
)
from stretto_foresight.planner.lengths import LogNormalLengths
from stretto_foresight.planner.machine import MachineProfile, machine_of
from stretto_foresight.planner.measure import ON_A_PROCESSOR, Measurements, measure_shape, profile_of
from stretto_foresight.planner.predict import predict

SHAPES = (
    ModelShape(90_000, 2, 64, 4, 4, 16, 32, tied=True),
    ModelShape(700_000, 3, 128, 4, 2, 32, 32, tied=True),
    ModelShape(4_000_000, 5, 256, 8, 4, 32, 32, tied=True),
)
KNOWN = MachineProfile(
    name="known",
    memory_gib=1.0,
    decode_flops=5e10,
    prefill_flops=5e10,
    train_flops=2e11,
    weight_bandwidth=1e18,
    cache_bandwidth=4e9,
    step_seconds=1e-4,
    layer_seconds=3e-4,
    prefill_seconds=1e-3,
    prefill_token_seconds=2e-6,
    load_seconds=1e-4,
    load_parameter_seconds=2e-10,
    row_seconds=5e-6,
    row_width_seconds=1e-8,
    train_seconds=2e-3,
    micro_batch_seconds=1e-3,
    token_width_seconds=1e-7,
    pair_width_seconds=1e-9,
    sequence_seconds=2e-5,
    parameter_seconds=2e-9,
)


def costs(shape: ModelShape) -> Costs:
    job = Job(
        shape=shape,
        lengths=LogNormalLengths(20, 0.0, 64),
        rollout=RolloutConfig(),
        engine=EngineConfig(),
        trainer=TrainerConfig(minibatches=1),
        longest=64,
    )
    return Costs(job, KNOWN, Layout(1, 1))


def assert_found(found: Mapping[str, float]) -> None:
    known = msgspec.structs.asdict(KNOWN)
    assert found == pytest.approx({name: known[name] for name in found}, rel=1e-3)


def test_the_numbers_of_a_known_machine_are_found_again_from_its_decode_steps() -> None:
    places = [(shape, rows, cached * rows) for shape in SHAPES for rows in (1, 8, 32, 96) for cached in (20, 50, 90)]
    assert_found(fit_decode([DecodeSample(s, r, c, costs(s).decode(r, c)) for s, r, c in places]))


def test_and_from_its_training_steps() -> None:
    batches = [(20,) * 16, (50,) * 64, (20, 90) * 64, (300,) * 40]
    samples = [
        TrainSample(shape, batch, -(-sum(batch) // 4096), costs(shape).train(batch))
        for shape in SHAPES
        for batch in batches
    ]
    assert_found(fit_training(samples))


def test_and_from_its_prefills_and_loads() -> None:
    """A pass takes the time of each layer, as a decode step does."""
    contexts = [(10,), (20,) * 8, (40,) * 32, (300, 20), (60,) * 60]
    prefills = [PrefillSample(shape, one, costs(shape).prefill(one)) for shape in SHAPES for one in contexts]
    assert_found(fit_prefill(prefills, KNOWN.layer_seconds))
    assert_found(fit_loads([LoadSample(shape.parameters, costs(shape).load()) for shape in SHAPES]))


def test_no_number_is_negative() -> None:
    """Seconds that fall with the second feature: it is left out."""
    assert least_squares([(1.0, 0.0), (1.0, 1.0), (1.0, 2.0)], [1.0, 1.0, 1.0]).tolist() == pytest.approx([1.0, 0.0])
    assert least_squares([(1.0, 0.0), (1.0, 1.0)], [2.0, 1.0])[1] == 0.0


class SlowPublisher(SharedMemoryPublisher):
    """Copies for a twentieth of a second more."""

    def copy(self, version: int, tensors: Iterable[tuple[str, Tensor]], gather: Gather = as_it_is) -> Publication:
        publication = super().copy(version, tensors, gather)
        until = time.process_time() + 0.05
        while time.process_time() < until:
            pass
        return publication


def test_a_measured_shape_makes_a_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The copy of a version, slow here, is counted once, as the trainer's: a version is transferred from its end."""
    monkeypatch.setattr(measure, "SharedMemoryPublisher", SlowPublisher)
    monkeypatch.setattr(measure, "_now", time.process_time)
    monkeypatch.setattr(measure, "_BATCHES", 2)  # the first of each length is not counted
    monkeypatch.setattr(measure, "_WINDOWS", 2)
    found = Measurements()
    measure_shape(ON_A_PROCESSOR[0], tmp_path / "model", found, rows=(2,))
    assert min(one.seconds for one in found.trainings) > 0.05
    assert 0 < min(found.transfers) < 0.05
    assert found.decodes
    assert found.prefills
    assert found.trainings
    assert found.loads
    assert min(one.seconds for one in found.decodes) > 0
    machine = profile_of(found, bandwidth=1e10)
    path = tmp_path / "machine.json"
    path.write_bytes(msgspec.json.encode(machine))
    assert machine_of(str(path)) == machine


def test_a_calibration_that_cannot_begin_leaves_the_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(say: Callable[[str], None]) -> MachineProfile:
        raise KeyboardInterrupt

    monkeypatch.setattr(calibrating, "calibrate", stopped)
    out = tmp_path / "machine.json"
    out.write_bytes(msgspec.json.encode(KNOWN))
    with pytest.raises(KeyboardInterrupt):
        calibrating.calibrate_machine(out, print)
    assert machine_of(str(out)) == KNOWN
    assert list(tmp_path.iterdir()) == [out]
    for place in (tmp_path, tmp_path / "nowhere" / "machine.json"):
        with pytest.raises(OSError, match="directory") as refused:
            calibrating.calibrate_machine(place, print)
        assert refused.value.filename == str(place)


def test_a_short_run_that_does_not_end_is_a_role_that_died(tmp_path: Path) -> None:
    with pytest.raises(RoleDied, match=r"the run of the calibration did not end within 0\.01 s"):
        calibrating.short_run(tmp_path / "recipe.toml", tmp_path / "run", (), patience=0.01)


def sample(machine: MachineProfile, staleness: int, groups: int) -> RunSample:
    """A run of this machine."""
    job = Job(
        shape=SHAPES[0],
        lengths=LogNormalLengths(20, 0.5, 64),
        rollout=RolloutConfig(batch_size=4, group_size=4, max_in_flight=groups, max_staleness=staleness),
        engine=EngineConfig(),
        trainer=TrainerConfig(minibatches=1, steps=15),
        longest=64,
    )
    return RunSample(job, predict(job, machine, Layout(1, 1)).terms)


def slower(machine: MachineProfile, decoding: float, training: float) -> MachineProfile:
    """Whose steps of generation and of training take so many times as long."""
    factors = dict.fromkeys(("step_seconds", "layer_seconds", "row_seconds", "row_width_seconds"), decoding)
    factors |= dict.fromkeys(("train_seconds", "micro_batch_seconds", "token_width_seconds"), training)
    factors |= dict.fromkeys(("pair_width_seconds", "sequence_seconds", "parameter_seconds"), training)
    factors |= dict.fromkeys(("decode_flops", "weight_bandwidth", "cache_bandwidth"), 1 / decoding)
    factors["train_flops"] = 1 / training
    changed = {name: getattr(machine, name) * factor for name, factor in factors.items()}
    return msgspec.structs.replace(machine, **changed)


ALONE = msgspec.structs.replace(KNOWN, cores=2.0, prefill_seconds=1e-3, conduct_seconds=1e-5)


def test_the_record_is_in_the_middle_of_what_roles_took_alone_and_in_a_run() -> None:
    """In the runs decoding takes 1.44 times as long as alone, and training 1.21 times: the record says 1.2 and 1.1."""
    truly = slower(ALONE, 1.44, 1.21)
    found = fit_runs(ALONE, [RunPair(sample(truly, 0, 4), sample(truly, 2, 8))])
    expected = msgspec.structs.asdict(slower(ALONE, 1.2, 1.1))
    del expected["beside"], expected["sources"], expected["name"]
    known = msgspec.structs.asdict(found)
    assert {name: known[name] for name in expected} == pytest.approx(expected, rel=0.02)


def test_roles_that_slow_each_other_down_are_found_out() -> None:
    """Alone and in turn they take what the record says; beside each other up to a fifth more."""
    truly = msgspec.structs.replace(ALONE, beside=0.2)
    pair = RunPair(sample(truly, 0, 4), sample(truly, 2, 8))
    found = fit_runs(ALONE, [pair])
    assert found.beside == pytest.approx(0.2, abs=0.03)
    for one in pair:
        step = predict(one.job, found, Layout(1, 1)).terms["step_seconds"]
        assert step == pytest.approx(one.measured["step_seconds"], rel=0.03)


def test_between_two_steps_the_conductor_takes_what_it_takes_where_a_batch_is_complete(tmp_path: Path) -> None:
    """Steps of a second, and between them 6.4 ms for 64 completions; twice of four times the trainer waits as well."""
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "ledger.sqlite").touch()
    at, spans = 0.0, SpanLog(RunFolder(folder).spans)
    for gap in (0.0064, 0.5, 0.0064, 0.25, 0.0064):
        at += gap
        names = ("proximal", "update", "publish")
        spans.append(Span("trainer", name, at + n / 3, at + (n + 1) / 3, 0) for n, name in enumerate(names))
        spans.append([Span("engine-0", "generate", at + 0.9, at + 1.1, 0)])
        at += 1
    assert between_steps(folder)["batch_seconds"] == pytest.approx(1e-4)


def test_what_is_neither_generation_nor_training_is_the_conductors_and_the_servers() -> None:
    """10 s, of which 2 s are neither, 0.5 s the conductor's; 1,000 completions; judging 0.5 s; the start 3 s."""
    run = Inspection(
        steps=10,
        version=10,
        wall_seconds=13.0,
        rl_seconds=10.0,
        initial_accuracy=None,
        final_accuracy=None,
        tokens=TokenCounts(1, 1, 0, 0),
        trajectories=TrajectoryCounts(1000, 1000, 0, 0, 0, 0, 0),
        staleness=StalenessSummary(0, 0, 0.0, {}),
        interrupted=0,
        multi_version=0,
        busy={"engine-0": 0.5, "trainer": 0.3, "rewards": 0.05, "conductor": 0.05},
        engines=(),
        weights=WeightsSummary(None, None, None, None),
    )
    assert between_roles(run) == pytest.approx(
        {"conduct_seconds": 5e-4, "serve_seconds": 1.5e-3, "judge_seconds": 5e-4, "start_seconds": 3.0}
    )
