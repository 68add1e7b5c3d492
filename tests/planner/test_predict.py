"""Promises of predictions:

- a layout is predicted by the real controller on the virtual clock: where everything is constant, the numbers are those
  that a person works out;
- synchronous runs take the sum of generation and training, asynchronous ones the longer of the two;
- of several devices every layout fits its memory, the best is first, and each goal has an order of its own;
- what fits in no layout is refused with by how much, and with what would make it fit, before any step is estimated;
- the search tells what it simulates, begins nothing after its patience, ends what is under way, and shows no layout
  twice;
- of the devices every division into whole engines and whole groups of ranks can be found, and what is pruned by its
  estimate is not faster than what was simulated;
- every profile of the package names the source of each of its numbers; an unknown machine is refused with the nearest.
"""

import contextlib
import itertools
from dataclasses import replace

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.core.errors import RecipeError
from stretto.engine.config import EngineConfig
from stretto.model.hf.shape import ModelShape
from stretto.rollout.config import RolloutConfig
from stretto.trainer.config import TrainerConfig
from stretto_foresight.planner.costs import Costs, Job, Layout
from stretto_foresight.planner.layouts import candidates, own_layout
from stretto_foresight.planner.lengths import LogNormalLengths
from stretto_foresight.planner.machine import MachineProfile, known_machines, machine_of
from stretto_foresight.planner.predict import distinct, plan, predict

SHAPE = ModelShape(1_000_000, 2, 64, 4, 2, 16, 100, tied=True)
# A second for each step of decoding; training at a token of the batch in a hundredth of a second.
CLOCK = MachineProfile(
    name="clock",
    memory_gib=160.0,  # a micro-batch of a million tokens fits
    decode_flops=1e15,
    prefill_flops=1e15,
    train_flops=1e15,
    weight_bandwidth=1e15,
    cache_bandwidth=1e15,
    step_seconds=1.0,
    token_width_seconds=0.01 / 64 / 2,
)
SEVEN = ModelShape(7_615_616_512, 28, 3584, 28, 4, 128, 152_064, tied=False)


def job(staleness: float = 4) -> Job:
    return Job(
        shape=SHAPE,
        lengths=LogNormalLengths(50, 0.0, 64, 10),
        rollout=RolloutConfig(batch_size=8, group_size=4, max_in_flight=24, max_staleness=staleness),
        engine=EngineConfig(slots=1024),
        trainer=TrainerConfig(steps=40, minibatches=1, micro_batch_tokens=1 << 20),
        longest=74,
    )


def test_a_synchronous_step_is_generation_and_then_training() -> None:
    """32 completions of 50 steps of a second; then 32 * 60 tokens in 19.2 s."""
    found = predict(job(0), CLOCK, Layout(1, 1))
    assert found.step_seconds == pytest.approx(50 + 19.2, rel=1e-3)
    assert found.busy["engine-0"] == pytest.approx(50 / 69.2, abs=0.01)
    assert found.busy["trainer"] == pytest.approx(19.2 / 69.2, abs=0.01)
    assert found.staleness.mean == 0.0
    assert found.tokens_per_second == pytest.approx(32 * 50 / 69.2, rel=1e-3)
    assert found.hours == pytest.approx(40 * 69.2 / 3600, rel=1e-3)


def test_an_asynchronous_step_is_the_longer_of_the_two() -> None:
    """24 groups at a time are three batches every 50 s: training, 19.2 s of each, is what a step waits for."""
    found = predict(job(4), CLOCK, Layout(1, 1))
    assert found.step_seconds == pytest.approx(19.2, rel=0.1)
    assert found.busy["trainer"] > 0.9
    assert found.waits_for == "training"
    assert 1.0 < found.staleness.mean <= 4.0


def test_the_terms_of_a_step_are_its_seconds_by_role_and_work() -> None:
    """The synchronous step again, judged in 2 s; the conductor takes 3.2 s before the training, of which the trainer
    knows nothing, and a load 4 s, beside which the engine generates for 50."""
    machine = msgspec.structs.replace(CLOCK, judge_seconds=0.0625, batch_seconds=0.1, load_seconds=4.0)
    found = predict(job(0), machine, Layout(1, 1))
    step = 50 + 4 * 0.0625 * 8 + 3.2 + 19.2 + 4
    terms = found.terms
    assert terms["step_seconds"] == found.step_seconds == pytest.approx(step, rel=0.02)
    assert terms["engines.generate"] == pytest.approx(50, rel=0.02)
    assert terms["engines.load"] == pytest.approx(4, rel=0.05)
    assert terms["engines.recompute"] == 0.0
    assert terms["engines.generate"] + terms["engines.load"] + terms["engines.idle"] == pytest.approx(
        found.step_seconds, rel=0.01
    )
    assert terms["trainer.update"] == pytest.approx(19.2, rel=0.01)
    assert terms["trainer.idle"] == pytest.approx(found.step_seconds - 19.2, rel=0.01)
    assert found.busy["trainer"] == pytest.approx(19.2 / step, abs=0.01)
    assert terms["rewards.score"] == pytest.approx(2.0)
    assert terms["completion_tokens"] == pytest.approx(50)


def test_a_timeline_has_the_last_steps_as_they_were_simulated() -> None:
    """Each synchronous step: 50 s of generation, 19.2 s of training, 4 s of a load."""
    found = predict(job(0), msgspec.structs.replace(CLOCK, load_seconds=4.0), Layout(1, 1))
    by_name = {name: [s for s in found.timeline if s.name == name] for name in ("generate", "update", "load")}
    assert [len(spans) for spans in by_name.values()] == [4, 4, 4]  # the load after the last step is not there yet
    assert [span.start for span in by_name["update"]] == pytest.approx([54 + 73.2 * step for step in range(4)])
    assert [span.end - span.start for span in by_name["generate"]] == pytest.approx([50.0] * 4)
    assert by_name["load"][0].start == pytest.approx(0.0)
    assert {(span.role, span.name) for span in found.timeline} == {
        ("engine-0", "generate"),
        ("engine-0", "load"),
        ("trainer", "update"),
        ("trainer", "publish"),
    }


def test_the_parts_of_training_add_up_to_its_step() -> None:
    """A quarter of the tokens have their log-probabilities from their own minibatch: the forward pass of the others is
    the proximal policy's, a third of what a forward and backward pass takes."""
    machine = msgspec.structs.replace(CLOCK, train_seconds=1.0, parameter_seconds=1e-6)
    asked = replace(job(), recomputes=True).with_settings({}, {}, {"minibatches": 4})
    parts = Costs(asked, machine, Layout(1, 1)).training([60] * 32)
    assert parts == pytest.approx((0.0, 19.2 * 0.75 / 3, 1.0 + 4 * 0.5 + 19.2, 0.5), rel=1e-4)


def test_many_ranks_wait_for_the_longest_sequence_of_each_minibatch() -> None:
    """Two minibatches, and the two longest sequences on one rank each: no number of ranks is faster than these."""
    machine = msgspec.structs.replace(CLOCK, train_flops=1e6, token_width_seconds=0.0)
    asked = job().with_settings({}, {}, {"minibatches": 2})
    many = Costs(asked, machine, Layout(1, 1 << 20)).training([60] * 30 + [600, 500])
    alone = Costs(asked, machine, Layout(1, 1)).training([600, 500])
    assert many.update == pytest.approx(alone.update)
    assert Costs(asked, machine, Layout(1, 2)).training([60] * 30 + [600, 500]).update > alone.update


def test_roles_that_share_cores_slow_each_other_down() -> None:
    """One core for two roles that both always work: twice as long."""
    alone = predict(job(4), CLOCK, Layout(1, 1))
    crowded = predict(job(4), msgspec.structs.replace(CLOCK, cores=1.0), Layout(1, 1))
    assert crowded.step_seconds == pytest.approx(2 * alone.step_seconds, rel=0.1)


def test_the_recipes_own_layout_is_the_only_one_without_a_number_of_devices() -> None:
    asked = job().with_settings({}, {"count": 3, "arguments": ("--tensor-parallel-size", "2")}, {"ranks": 2})
    assert own_layout(asked) == Layout(3, 2, tensor=2)
    found = plan(asked, CLOCK, None)
    assert [(one.engines, one.ranks, one.tensor) for one in found.layouts] == [(3, 2, 2)]
    assert found.layouts[0].busy.keys() == {"engine-0", "engine-1", "engine-2", "trainer", "rewards"}


def test_a_synchronous_run_of_a_server_is_not_in_rounds() -> None:
    """Of the native engine alone groups begin and end together: others begin while the longest is under way."""
    tail = replace(job(0), lengths=LogNormalLengths(50, 1.0, 400, 10))
    served, shared = (tail.with_settings({"max_in_flight": 3}, {name: value}, {}) for name, value in KINDS)
    rounds = tail.with_settings({"max_in_flight": 3}, {}, {})
    assert (rounds.in_rounds, served.in_rounds) == (True, False)
    steps = [predict(one, CLOCK, Layout(1, 1)).step_seconds for one in (rounds, served, shared)]
    assert steps[0] > steps[1] == steps[2]


KINDS = (("kind", "vllm"), ("batching", "shared"))


def large() -> Job:
    return Job(
        shape=SEVEN,
        lengths=LogNormalLengths(600, 0.8, 2048, 100),
        rollout=RolloutConfig(batch_size=8, group_size=4, max_staleness=4),
        engine=EngineConfig(kind="vllm", dtype="bfloat16", slots=256),
        trainer=TrainerConfig(
            steps=12, minibatches=1, micro_batch_tokens=8192, activation_checkpointing=True, dtype="bfloat16"
        ),
        longest=2148,
    )


def test_a_profile_of_a_gpu_says_what_it_assumes_where_that_is_most_of_a_step() -> None:
    """8,192 completions of 700 tokens take seven H100 some minutes with `large`; a batch of `job`, no millisecond."""
    h100, short, said = machine_of("h100"), "0.005 s of each decode step and 2 s of each training step", list[str]()
    plan(job().with_settings({}, {}, {"micro_batch_tokens": 1024}), h100, None, say=said.append)
    assert [line for line in said if line.startswith("warning: ") and short in line and "--calibrate" in line] == said
    large_batch = large().with_settings({"batch_size": 1024, "group_size": 8, "max_in_flight": 4096}, {}, {})
    assert max(Costs(large_batch, h100, Layout(1, 7)).fixed_shares) < 0.5
    plan(job(), CLOCK, None, say=said.append)
    assert len(said) == 1


def test_fixed_seconds_of_a_role_that_is_mostly_idle_are_no_reason_to_warn() -> None:
    """64 engines need 6.5 ms for a token, 5 of them for any model; the trainer needs 4 s more than its 2 for any."""
    rollout, trainer = {"batch_size": 1024, "max_in_flight": 512}, {"micro_batch_tokens": 8192}
    billion = replace(job(), shape=ModelShape(10**9, 8, 2048, 16, 8, 128, 32_000, tied=True), reward_workers=64)
    idle, h100, said = billion.with_settings(rollout, {"count": 64}, trainer), machine_of("h100"), list[str]()
    (found,) = plan(idle, h100, None, say=said.append).layouts
    of_decode, of_training = Costs(idle, h100, Layout(64, 1)).fixed_shares
    assert (found.waits_for, of_decode > 0.75, of_training > 0.75) == ("training", True, False)
    assert said == []


@pytest.mark.parametrize("goal", ["time", "cost", "staleness"])
def test_layouts_fit_their_devices_and_stand_in_the_order_of_the_goal(goal: str) -> None:
    h100 = machine_of("h100")
    found = plan(large(), h100, 8, goal).layouts
    assert len(found) > 3
    for one in found:
        layout = Layout(one.engines, one.ranks, one.tensor)
        assert layout.devices == 8 or (goal == "cost" and layout.devices in (2, 4))
        filled = large().with_settings({}, {}, {"micro_batch_tokens": one.micro_batch_tokens})
        assert one.memory_gib <= 0.9 * h100.memory_gib
        assert Costs(filled, h100, layout).memory().missing <= 0
    if goal == "staleness":
        fastest = min(one.hours for one in found)
        assert found[0].hours <= 1.1 * fastest
        assert found[0].staleness.mean == min(one.staleness.mean for one in found if one.hours <= 1.1 * fastest)
    else:
        values = [one.hours if goal == "time" else one.device_hours for one in found]
        assert values == sorted(values)


def test_what_fits_nowhere_is_refused_with_what_would_make_it_fit() -> None:
    """What the recipe does already is no remedy."""
    for saves, remedy in ((True, "--gpus 4"), (False, "--gpus 4 with activation checkpointing")):
        asked = large().with_settings({}, {}, {"activation_checkpointing": saves})
        with pytest.raises(RecipeError) as refused:
            plan(asked, machine_of("a100"), 2)
        assert "GiB too much" in str(refused.value)
        assert str(refused.value).endswith(remedy)


def tensors_of(asked: Job) -> set[int]:
    return {one.layout.tensor for one in candidates(asked, machine_of("h200"), 16)}


def test_engines_are_of_devices_that_share_out_their_heads() -> None:
    """28 heads are shared out to 1, 2 or 4 devices, six of the cache to 1 or 2; the native engine has one device."""
    assert tensors_of(large()) == {1, 2, 4}
    assert tensors_of(replace(large(), shape=msgspec.structs.replace(SEVEN, heads=24, kv_heads=6))) == {1, 2}
    assert tensors_of(large().with_settings({}, {"kind": "native", "cache_gib": 40.0}, {})) == {1}


def test_many_devices_train_with_as_many_ranks_as_a_batch_feeds() -> None:
    """64 completions in 4 minibatches feed 16 ranks, fewer than a sixteenth of 512."""
    fed = large().with_settings({"batch_size": 16}, {}, {"minibatches": 4})
    assert max({one.layout.ranks for one in candidates(fed, machine_of("h200"), 512)}) == 16
    assert fed.completions == 64
    with pytest.raises(RecipeError, match="32 completions a step cannot be shared out to 64 minibatches"):
        candidates(large().with_settings({}, {}, {"minibatches": 64}), machine_of("h200"), 8)


def test_devices_that_ranks_which_compute_together_use_up_are_told_with_the_least_number() -> None:
    together = large().with_settings({}, {}, {"tensor_parallel": 4, "ranks": 4})
    with pytest.raises(RecipeError, match=r"--gpus 4: too few devices .* 4 ranks; 5 are needed at least"):
        candidates(together, machine_of("h200"), 4)


def test_the_recipes_own_layout_needs_the_memory_too() -> None:
    """16 bytes of 7.6e9 parameters are more than one A100; the weights of an engine alone are more than 8 GiB."""
    with pytest.raises(RecipeError, match=r"trainer\.ranks = 1: .*training needs .* GiB too much"):
        plan(large(), machine_of("a100"), None)
    many = large().with_settings({}, {"count": 2}, {"ranks": 512})
    with pytest.raises(RecipeError, match=r"engine\.count = 2: .*generation needs .* GiB too much"):
        plan(many, msgspec.structs.replace(machine_of("a100"), memory_gib=15.0), None)


def test_judging_is_what_a_step_waits_for_where_it_is_slowest() -> None:
    """32 completions of 4 s each take one worker 128 s, two workers 64 s, eight workers 16 s; training takes 19.2 s."""
    slow = msgspec.structs.replace(CLOCK, judge_seconds=4.0)
    one, two, eight = (predict(replace(job(4), reward_workers=count), slow, Layout(1, 1)) for count in (1, 2, 8))
    assert one.step_seconds == pytest.approx(128, rel=0.05)
    assert two.step_seconds == pytest.approx(64, rel=0.05)
    assert (one.waits_for, two.waits_for, eight.waits_for) == ("judging", "judging", "training")
    assert one.busy["rewards"] == pytest.approx(1.0, abs=0.05)
    assert eight.busy["rewards"] == pytest.approx(16 / 19.2, abs=0.09)


@pytest.mark.parametrize("name", known_machines())
def test_every_number_of_a_profile_has_its_source(name: str) -> None:
    profile = machine_of(name)
    default = MachineProfile(name, 0, 0, 0, 0, 0, 0)
    given = {key for key in profile.__struct_fields__ if getattr(profile, key) != getattr(default, key)}
    assert given - {"sources"} <= profile.sources.keys() | {"node_devices"}


def test_an_unknown_machine_is_refused_with_the_nearest_and_how_to_measure_one() -> None:
    with pytest.raises(RecipeError) as refused:
        machine_of("h1000")
    assert "did you mean 'h100'?" in str(refused.value)
    assert "stretto plan --calibrate" in str(refused.value)


def test_what_is_simulated_is_told_and_nothing_begins_after_the_patience() -> None:
    told: list[str] = []

    def clock() -> float:  # the time is over as soon as the second simulation has begun
        return 31.0 if sum(line.startswith("simulating") for line in told) > 1 else 0.0

    found = plan(large(), machine_of("h200"), 16, say=told.append, clock=clock)
    simulating = [line for line in told if line.startswith("simulating")]
    assert len(simulating) >= len(found.layouts)
    assert any("more layouts are not simulated" in line for line in told)
    assert any("this layout is judged by" in line for line in told)
    unhurried: list[str] = []
    everything = plan(large(), machine_of("h200"), 16, say=unhurried.append, clock=lambda: 0.0)
    assert len(unhurried) > len(simulating)
    assert everything.layouts[0].step_seconds <= found.layouts[0].step_seconds
    assert distinct(everything.layouts) == list(everything.layouts), "but for the bound, no two rows are the same"


def test_one_long_simulation_ends_with_a_step_when_the_patience_is_over() -> None:
    told: list[str] = []
    times = itertools.chain([0.0], itertools.repeat(31.0))
    assert len(plan(large(), machine_of("h200"), 16, say=told.append, clock=lambda: next(times)).layouts) == 1
    assert "30 s are over: this layout is judged by" in "".join(told)
    own = plan(job(), CLOCK, None, say=told.append, clock=lambda: 0.0)
    hurried = plan(job(), CLOCK, None, clock=lambda: next(times))
    assert hurried.layouts[0].step_seconds == pytest.approx(own.layouts[0].step_seconds, rel=0.5)


def test_layouts_that_differ_in_a_bound_that_is_never_reached_are_one_row() -> None:
    one = predict(job(), CLOCK, Layout(1, 1))
    replaced = msgspec.structs.replace
    same = replaced(one, max_staleness=16.0, step_seconds=one.step_seconds * 1.001)
    staler = replaced(one, max_staleness=16.0, staleness=replaced(one.staleness, mean=one.staleness.mean + 1))
    faster = replaced(one, max_staleness=16.0, step_seconds=one.step_seconds * 0.9)
    other = replaced(one, ranks=2)
    assert distinct([one, same, staler, faster, other]) == [one, staler, faster, other]


def test_a_layout_without_the_memory_is_refused_before_any_step_is_estimated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Costs, "decode", lambda self, rows, cached: pytest.fail("a step was estimated"))
    with pytest.raises(RecipeError, match="no layout has the memory"):
        candidates(large(), replaced_memory(8.0), 8)


def replaced_memory(gib: float) -> MachineProfile:
    return msgspec.structs.replace(machine_of("h200"), memory_gib=gib)


def whole(devices: int, together: int, tensor: int, most: int) -> list[int]:
    """The numbers of ranks that leave whole engines, in whole groups."""
    return [
        ranks
        for ranks in range(1, min(most, devices - tensor) + 1)
        if ranks % together == 0 and (devices - ranks) % tensor == 0
    ]


@given(devices=st.integers(2, 300), together=st.sampled_from([1, 2, 4, 8]), groups=st.integers(1, 64))
def test_every_tensor_size_has_a_layout_where_devices_are_divided(devices: int, together: int, groups: int) -> None:
    """32 heads, 8 of them for keys: engines of 1, 2, 4 and 8 devices. 24 devices are 8 ranks and two engines of 8."""
    asked = replace(job(), shape=ModelShape(1_000_000, 2, 64, 32, 8, 16, 100, tied=True)).with_settings(
        {"batch_size": groups}, {"kind": "vllm"}, {"ranks": together, "tensor_parallel": together}
    )
    possible = {tensor: whole(devices, together, tensor, groups * 4 * together) for tensor in (1, 2, 4, 8)}
    found = set[Layout]()
    with contextlib.suppress(RecipeError):
        found = {one.layout for one in candidates(asked, CLOCK, devices)}
    assert {layout.tensor for layout in found} == {tensor for tensor, ranks in possible.items() if ranks}
    for layout in found:
        assert layout.ranks in possible[layout.tensor]
        assert layout.devices == devices


BOUND = [(0.002, 0.0, 4), (0.002, 1.0, 4), (0.001, 0.5, 2), (0.002, 0.0, 0), (4.0, 1.0, 4), (0.004, 1.5, 8)]


@pytest.mark.parametrize(("cache_gib", "sigma", "staleness"), BOUND)
def test_an_estimate_is_optimistic(cache_gib: float, sigma: float, staleness: float) -> None:
    """A layout whose estimate is longer than a simulated step is not simulated: it must not be the faster one."""
    asked = replace(job(staleness), lengths=LogNormalLengths(50, sigma, 400, 10), longest=410).with_settings(
        {"max_in_flight": 200}, {"cache_gib": cache_gib, "kind": "vllm"}, {}
    )
    machine = msgspec.structs.replace(CLOCK, token_width_seconds=0.0)
    (first, *_) = [one for one in candidates(asked, machine, 2) if one.job.trainer.micro_batch_tokens == 1 << 20]
    found = predict(first.job, machine, first.layout)
    assert first.estimate <= 1.02 * found.step_seconds


def test_a_cache_that_may_hold_every_slot_holds_them_in_the_simulation() -> None:
    """32 completions of 64 tokens run together for 64 s, and make a batch. Slots of the native engine have powers of
    two as lengths: 4 GiB hold them a hundred times over."""
    asked = replace(job(4), lengths=LogNormalLengths(64, 0.0, 64, 10)).with_settings(
        {"max_in_flight": 8}, {"slots": 32, "on_update": "keep"}, {}
    )
    found = predict(asked, msgspec.structs.replace(CLOCK, token_width_seconds=0.0), Layout(1, 1))
    assert found.recomputed == 0.0
    assert found.step_seconds == pytest.approx(64, rel=0.02)
