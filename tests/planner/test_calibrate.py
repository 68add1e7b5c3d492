"""Promises of a calibration:

- what a machine of known numbers would have taken gives these numbers back, whatever the shapes;
- no number is negative, and what costs nothing has a rate of its own;
- a measured shape gives samples of every kind, and they make a machine;
- a publication is counted once;
- a file that is there stays until it is replaced by a whole measurement; a run that does not end is an error;
- runs on a machine on which roles take longer than alone correct its record until they come out as they were;
- what of a synchronous run is neither generation, training nor the conductor's work is the engine's server's.
"""

import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import msgspec
import pytest
from torch import Tensor

from stretto.core.errors import RoleDied
from stretto.engine.config import EngineConfig
from stretto.launch.commands import calibrate as calibrating
from stretto.launch.commands.calibrate import between_roles
from stretto.planner import measure
from stretto.planner.costs import Costs, Layout
from stretto.planner.fit import DecodeSample, TrainSample, fit_decode, fit_training, least_squares
from stretto.planner.job import Job, ModelShape
from stretto.planner.lengths import LogNormalLengths
from stretto.planner.machine import MachineProfile, machine_of
from stretto.planner.measure import ON_A_PROCESSOR, Measurements, measure_shape, profile_of
from stretto.planner.predict import predict
from stretto.planner.whole_runs import RunSample, fit_runs
from stretto.rollout.config import RolloutConfig
from stretto.store.inspection import Inspection, StalenessSummary, TokenCounts, TrajectoryCounts, WeightsSummary
from stretto.trainer.config import TrainerConfig
from stretto.weights.mailbox import Gather, as_it_is
from stretto.weights.shared_memory import SharedMemoryPublisher

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
    row_seconds=5e-6,
    row_width_seconds=1e-8,
    train_seconds=2e-3,
    micro_batch_seconds=1e-3,
    token_width_seconds=1e-7,
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


def test_no_number_is_negative() -> None:
    """Seconds that fall with the second feature: it is left out."""
    assert least_squares([(1.0, 0.0), (1.0, 1.0), (1.0, 2.0)], [1.0, 1.0, 1.0]).tolist() == pytest.approx([1.0, 0.0])
    assert least_squares([(1.0, 0.0), (1.0, 1.0)], [2.0, 1.0])[1] == 0.0


class SlowPublisher(SharedMemoryPublisher):
    """Works for a twentieth of a second more."""

    def publish(self, version: int, tensors: Iterable[tuple[str, Tensor]], gather: Gather = as_it_is) -> None:
        super().publish(version, tensors, gather)
        until = time.process_time() + 0.05
        while time.process_time() < until:
            pass


def test_a_measured_shape_makes_a_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A publication, slow here, is counted once, as the trainer's: a version is transferred from its end."""
    monkeypatch.setattr(measure, "SharedMemoryPublisher", SlowPublisher)
    monkeypatch.setattr(measure, "_now", time.process_time)
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


def test_a_calibration_that_cannot_begin_leaves_the_machine_that_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_whole_runs_correct_what_roles_took_alone() -> None:
    """In the runs decoding takes 1.5 times as long as alone, training 1.3 times and contexts twice; each role makes the
    other slower by up to a fifth."""
    alone = msgspec.structs.replace(KNOWN, cores=2.0, prefill_seconds=1e-3, conduct_seconds=1e-5)
    truly = msgspec.structs.replace(
        alone,
        step_seconds=1.5e-4,
        layer_seconds=4.5e-4,
        row_seconds=7.5e-6,
        row_width_seconds=1.5e-8,
        decode_flops=5e10 / 1.5,
        cache_bandwidth=4e9 / 1.5,
        prefill_seconds=2e-3,
        prefill_flops=2.5e10,
        train_seconds=2.6e-3,
        micro_batch_seconds=1.3e-3,
        token_width_seconds=1.3e-7,
        sequence_seconds=2.6e-5,
        parameter_seconds=2.6e-9,
        train_flops=2e11 / 1.3,
        beside=0.2,
    )

    def run(staleness: int, groups: int) -> RunSample:
        job = Job(
            shape=SHAPES[0],
            lengths=LogNormalLengths(20, 0.5, 64),
            rollout=RolloutConfig(batch_size=4, group_size=4, max_in_flight=groups, max_staleness=staleness),
            engine=EngineConfig(),
            trainer=TrainerConfig(minibatches=1, steps=15),
            longest=64,
        )
        return RunSample(job, predict(job, truly, Layout(1, 1)).terms)

    in_turn, beside = run(0, 4), run(2, 8)
    found = fit_runs(alone, in_turn, beside)
    for sample in (in_turn, beside):
        terms = predict(sample.job, found, Layout(1, 1)).terms
        for name in ("step_seconds", "engines.generate", "engines.recompute", "trainer.update"):
            assert terms[name] == pytest.approx(sample.measured[name], rel=0.05), name


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
