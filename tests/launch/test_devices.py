"""Promises: `--dry-run` says which GPU each rank and engine has, what it needs there and how a shared one is split;
the same ids are in the specs of the roles and in the environment of their processes; what is on a GPU is not counted
in the machine's memory; too many ranks, GPUs that differ or are too small, a driver older than torch's CUDA and
interfaces that are not there are refused before anything starts; a warm start is placed and estimated like a rank;
float32 on a GPU is said to be slow.
"""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from stretto.core.errors import RecipeError, RoleDied
from stretto.core.machine import Gpu, Seat, unusable
from stretto.launch.assemble.specs import Endpoints, engine_spec, engine_specs, trainer_spec
from stretto.launch.preflight.devices import (
    assumed_gpus,
    engine_parts,
    missing_interfaces,
    notes_of,
    seat_of_supervised,
    seat_of_warm_start,
    seats_of,
    usable_gpus,
)
from stretto.launch.preflight.plan import Plan, make_plan
from stretto.launch.recipe.recipe import load_recipe
from stretto.loop.engines.handle import EngineHandle
from stretto.loop.engines.proving import Proving
from stretto.loop.trainer_link import TrainerLink
from stretto.processes.spawn import FreshSpawner, RunningProcess, Spawn
from stretto.trainer.config import TrainerConfig
from stretto.trainer.memory import collective_bytes
from stretto_app.extensions.commands.serve import recipe_of_engines
from stretto_app.extensions.preflight.dry_run import unplaced
from stretto_app.extensions.preflight.embedded import seats_of_engines
from stretto_app.extensions.preflight.estimates import estimate_memory
from tests.launch.running import TINY, Laboratory

pytestmark = pytest.mark.usefixtures("untried")

GIB = 1 << 30
PlanFor = Callable[..., Plan]


@pytest.fixture(scope="module")
def plan_for(laboratory: Laboratory) -> PlanFor:
    @cache
    def plan(*settings: str) -> Plan:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("STRETTO_CACHE", str(laboratory.cache))
            return make_plan(load_recipe(TINY, settings))

    return plan


def test_ranks_have_a_gpu_each_and_engines_the_others(plan_for: PlanFor, tmp_path: Path) -> None:
    small = "engine.slots=1", "engine.max_prefill_tokens=1"
    plan = plan_for("trainer.ranks=2", "engine.count=3", "algorithm.reference.weight=0.1", *small)
    seats = seats_of(plan, assumed_gpus("4x80"))
    assert [(seat.need.role, seat.ids) for seat in seats] == [
        ("rank 0", ("0",)),
        ("rank 1", ("1",)),
        ("engine-0", ("2",)),
        ("engine-1", ("3",)),
        ("engine-2", ("2",)),
    ]
    assert {"weights", "gradients", "moments", "reference", "activations"} <= set(seats[0].need.parts)
    assert list(notes_of(seats)) == ["GPU 2 is shared: engine-0 at most 49%, engine-2 at most 49% of its memory"]
    endpoints = Endpoints("mailbox", tmp_path, tmp_path, seats=seats)
    specs = engine_specs(plan.recipe, plan.base.path, endpoints)
    assert [spec.gpus for spec in specs] == [("2",), ("3",), ("2",)]
    assert specs[1].share == 1.0 > 2 * specs[0].share
    assert engine_spec(plan.recipe, plan.base.path, endpoints, 4, True).gpus == ("3",), "of `stretto scale`, in turn"
    assert trainer_spec(replace(plan, seats=seats), plan.base.path, endpoints, tmp_path).gpus == ("0", "1")


def test_one_gpu_is_shared_and_processors_need_none(plan_for: PlanFor) -> None:
    plan = plan_for()
    rank, engine = seats_of(plan, assumed_gpus("1x24"))
    assert rank.ids == engine.ids == ("0",)
    assert 0 < rank.share + engine.share < 1, "the contexts of both have a part"
    assert [seat.need.role for seat in seats_of(plan_for("trainer.device=cpu"), assumed_gpus("1x24"))] == ["engine-0"]
    assert seats_of(plan_for("trainer.device=cpu", "engine.device=cpu"), assumed_gpus("1x24")) == ()
    assert seats_of(plan, ()) == ()


def test_a_server_has_a_gpu_for_each_stage_of_each_copy_of_its_model(plan_for: PlanFor) -> None:
    base = plan_for()
    engine = base.recipe.engine.model_copy(update={"kind": "vllm", "arguments": ("-pp", "2", "-dp", "2")})
    plan = replace(base, recipe=base.recipe.model_copy(update={"engine": engine}))
    weights = "weights of the engine"
    assert engine_parts(plan)[weights] == 2 * engine_parts(base)[weights]
    assert seats_of(plan, assumed_gpus("8x80"), ranks=False)[0].ids == ("0", "1", "2", "3")
    with pytest.raises(RecipeError, match=r"engine.arguments: a server on 4 GPUs .* has 2; at most 2"):
        seats_of(plan, assumed_gpus("2x80"), ranks=False)


@pytest.mark.parametrize(
    ("settings", "there", "words"),
    [
        (("trainer.ranks=2",), "1x80", "trainer.ranks: 2, and the machine has 1 GPUs, one for each rank; at most 1"),
        (
            ("engine.cache_gib=90", "engine.slots=65536", "sampling.max_tokens=80", "model.build.layers=4"),
            "2x1",
            "largest: cache, .*; a smaller engine.cache_gib",
        ),
        (("trainer.micro_batch_tokens=9000000",), "2x2", "largest: activations, .*, or a smaller trainer.micro_batch"),
        ((), "8 of 80", "STRETTO_GPUS: '8 of 80'; number of GPUs and GiB of each, as in 8x80"),
        ((), "0x80", "STRETTO_GPUS"),
    ],
)
def test_what_does_not_fit_is_refused(plan_for: PlanFor, settings: tuple[str, ...], there: str, words: str) -> None:
    plan = plan_for(*settings)
    with pytest.raises(RecipeError, match=words) as refused:
        seats_of(plan, assumed_gpus(there))
    assert refused.value.exit_code == 2


def test_ranks_on_gpus_that_differ_are_refused(plan_for: PlanFor) -> None:
    fast, slow = (Gpu(str(n), name, 80 * GIB, 80 * GIB) for n, name in enumerate(("H100", "A100")))
    plan = plan_for("trainer.ranks=2")
    with pytest.raises(
        RecipeError, match=r"trainer.ranks: rank 0 on GPU 0, H100 of .* rank 1 on GPU 1, A100 of 80.0 GiB; .*VISIBLE"
    ):
        seats_of(plan, (fast, slow))
    third = Gpu("2", "A100", 80 * GIB, 80 * GIB)
    assert [seat.ids for seat in seats_of(plan, (fast, slow, third))] == [("1",), ("2",), ("0",)]
    (note,) = notes_of(seats_of(plan_for("engine.device=cpu"), (replace_free(fast, 8 * GIB),)))
    assert note == "GPU 0: others use 72.0 of its 80.0 GiB"


def test_gpus_of_several_sizes_are_assumed_hidden_and_judged_like_real_ones(
    plan_for: PlanFor, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = plan_for("trainer.ranks=2").recipe
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setenv("STRETTO_GPUS", "2x80, 3x24@570.86")
    there = usable_gpus(recipe, dry=True)
    assert [(gpu.id, gpu.memory // GIB) for gpu in there] == [("0", 80), ("1", 80), ("2", 24), ("3", 24), ("4", 24)]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,4,2")
    there = usable_gpus(recipe, dry=True)
    assert [gpu.id for gpu in there] == ["1", "4", "2"]
    assert [seat.ids for seat in seats_of(plan_for("trainer.ranks=2"), there)] == [("4",), ("2",), ("1",)]
    with pytest.raises(RecipeError, match=r"rank 0 on GPU 1, assumed GPU of 80.0 GiB and rank 1 on GPU 4, .* 24.0 GiB"):
        seats_of(plan_for("trainer.ranks=2"), there[:2])
    monkeypatch.setenv("STRETTO_GPUS", "8x80@450.51")
    with pytest.raises(RecipeError, match=r"device: the driver 450.51 is too old .*; update the driver, or train"):
        usable_gpus(recipe, dry=True)
    assert usable_gpus(plan_for("engine.device=cpu", "trainer.device=cpu").recipe, dry=True) == ()


def test_engines_of_a_server_take_the_gpus_with_the_most_room(plan_for: PlanFor, tmp_path: Path) -> None:
    there = (
        Gpu("0", "H100", 80 * GIB, 20 * GIB),
        Gpu("MIG-7", "part of a GPU (MIG)"),
        Gpu("2", "A100", 40 * GIB, 39 * GIB),
    )

    def seats(*words: str, there: tuple[Gpu, ...] = there) -> tuple[Seat, ...]:
        return seats_of_engines(recipe_of_engines(tmp_path, words), plan_for().base, there)

    [seat] = seats("engine.cache_gib=10")
    assert (seat.ids, seat.room) == (("2",), 1.0), "the driver's part of an idle GPU counts as free"
    endpoints = Endpoints("m", tmp_path, tmp_path, seats=(seat,))
    [spec] = engine_specs(recipe_of_engines(tmp_path, ()), tmp_path, endpoints, published=False)
    assert (spec.gpus, spec.share) == (("2",), 1.0)
    [busy] = seats("engine.cache_gib=10", there=there[:1])
    assert busy.room == 0.25, "as much as others leave"
    assert [seat.ids for seat in seats("engine.count=2", "engine.cache_gib=10")] == [("2",), ("0",)]
    assert seats("engine.device=cpu") == seats(there=()) == ()
    with pytest.raises(RecipeError, match=r"GPU 0: engine-0: needs 90\.5 of 20\.0 GiB; largest: cache"):
        seats("engine.cache_gib=90", there=there[:1])


def test_a_process_that_trains_on_examples_is_estimated_and_placed(plan_for: PlanFor) -> None:
    """On the GPU with the most memory left; a second model and longer examples need more."""
    plan = plan_for("warm_start.steps=2")
    there = (Gpu("0", "H100", 80 * GIB, 20 * GIB), Gpu("1", "H100", 80 * GIB, 70 * GIB))
    seat = seat_of_warm_start(plan, there)
    assert seat is not None
    assert (seat.need.role, seat.ids) == ("warm start", ("1",))
    assert {"weights", "gradients", "moments", "activations"} <= set(seat.need.parts)
    config = plan.recipe.warm_start
    assert config is not None
    alone = seat_of_supervised("preferences", config, plan.base, 10, there)
    both = seat_of_supervised("preferences", config, plan.base, 10, there, reference=plan.base)
    assert alone is not None
    assert both is not None
    assert both.need.bytes == alone.need.bytes + alone.need.parts["weights"]
    with pytest.raises(RecipeError, match=r"GPU 1: .* largest: activations, .*; preferences\.activation_ch.* = true$"):
        seat_of_supervised("preferences", config, plan.base, 90_000_000, there)
    assert seat_of_warm_start(replace(plan, demonstrations=()), there) is None
    assert seat_of_warm_start(plan, ()) is None


def test_a_machine_without_gpus_is_not_said_to_run_what_asks_for_one(plan_for: PlanFor) -> None:
    """The recipe's config alone: such a run is refused before, unless its model has no weights here."""
    recipe = plan_for().recipe
    assert unplaced(recipe) == "every role of this machine runs on the processor"
    asking = recipe.trainer.model_copy(update={"device": "cuda"})
    assert unplaced(recipe.model_copy(update={"trainer": asking})) == (
        "trainer.device asks for a GPU, and this machine shows none; STRETTO_GPUS=8x80 assumes eight of 80 GiB"
    )


def test_what_is_on_a_gpu_is_not_counted_in_the_machine_s_memory(plan_for: PlanFor) -> None:
    plan = plan_for()
    beside = estimate_memory(replace(plan, seats=seats_of(plan, assumed_gpus("1x80"))))
    here = estimate_memory(plan_for("trainer.device=cpu", "engine.device=cpu"))
    assert here.trainer - beside.trainer == here.rank.total == beside.rank.total
    assert here.engines - beside.engines == sum(engine_parts(plan).values())


def test_what_nccl_holds_is_counted_for_each_of_its_groups(plan_for: PlanFor) -> None:
    """Of ranks that divide matrices: all, their shares, those of FSDP and those of a layer."""
    one, several = (seats_of(plan_for(f"trainer.ranks={ranks}"), assumed_gpus("4x80"))[0] for ranks in (1, 2))
    assert "collectives" not in one.need.parts
    each = several.need.parts["collectives"]
    assert each == collective_bytes(TrainerConfig(ranks=8)) > GIB / 8
    assert collective_bytes(TrainerConfig(ranks=8, tensor_parallel=2)) == 4 * each
    assert collective_bytes(TrainerConfig(ranks=8, context_parallel=2)) == 3 * each


def replace_free(gpu: Gpu, free: int) -> Gpu:
    return Gpu(gpu.id, gpu.name, gpu.memory, free)


@pytest.mark.parametrize(
    ("driver", "cuda", "words"),
    [
        ("470.57.02", "12.8", "the driver 470.57.02 is too old for this torch, whose CUDA 12.8 needs 525.60 or newer"),
        ("570.86.15", "13.0", "needs 580.65 or newer"),
        ("570.86.15", None, "this torch is built for processors alone, and the machine has 1 × H100"),
        ("570.86.15", "12.8", "torch cannot start CUDA 12.8 on H100 with the driver 570.86.15"),
    ],
)
def test_why_torch_cannot_use_a_gpu_is_said(driver: str, cuda: str | None, words: str) -> None:
    assert words in unusable([Gpu("0", "H100", driver=driver)], cuda)


@pytest.mark.parametrize(
    ("told", "wrong"),
    [
        ({"GLOO_SOCKET_IFNAME": "eth7"}, "GLOO_SOCKET_IFNAME"),
        ({"GLOO_SOCKET_IFNAME": "eth7,eth0"}, None),
        ({"NCCL_SOCKET_IFNAME": "ib"}, "NCCL_SOCKET_IFNAME"),
        ({"NCCL_SOCKET_IFNAME": "eth"}, None),
        ({"NCCL_SOCKET_IFNAME": "=eth"}, "NCCL_SOCKET_IFNAME"),
        ({"NCCL_SOCKET_IFNAME": "^docker"}, None),
        ({}, None),
    ],
)
def test_collectives_bound_to_no_interface_are_refused(told: dict[str, str], wrong: str | None) -> None:
    found = [problem.place for problem in missing_interfaces(TrainerConfig(ranks=2), told, ["lo", "eth0"])]
    assert found == ([wrong] if wrong else [])
    assert not list(missing_interfaces(TrainerConfig(), told, ["lo", "eth0"]))


def test_a_dry_run_shows_the_table(laboratory: Laboratory, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = laboratory.run("train", TINY, "--dry-run")
    assert "devices     every role of this machine runs on the processor" in shown.out
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")  # assumed GPUs are hidden as real ones are
    monkeypatch.setenv("STRETTO_GPUS", "1x80")
    shown = laboratory.run("train", TINY, "--dry-run", "warm_start.steps=2")
    warm, rank, engine, shared, *slow = (line for line in shown.out.splitlines() if line.startswith("devices"))
    assert warm.startswith("devices     warm start  GPU 0: ")
    assert [line.split()[1] for line in slow] == ["trainer.dtype", "engine.dtype"]
    assert all("without tensor cores" in line for line in slow)
    assert rank.startswith("devices     rank 0      GPU 0: ")
    assert "weights 0.0, gradients 0.0, moments 0.0, activations 0.0" in rank
    assert engine.startswith("devices     engine-0    GPU 0: ")
    assert shared.startswith("devices     GPU 0 is shared: rank 0 at most ")
    laboratory.run("train", TINY, "--dry-run", "trainer.ranks=2").refused("trainer.ranks: 2", "1 GPUs")
    cuda = "trainer.device=cuda", "engine.device=cuda"
    assert "devices     rank 0" in laboratory.run("train", TINY, "--dry-run", *cuda).out, "assumed GPUs are judged"
    monkeypatch.delenv("STRETTO_GPUS")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    laboratory.run("train", TINY, "--dry-run", *cuda).refused("trainer.device", "torch finds no GPU")


class Environments(FreshSpawner):
    """Starts processes, and keeps what they were given."""

    def __init__(self) -> None:
        self.seen: list[dict[str, str]] = []

    async def start(self, spawn: Spawn) -> RunningProcess:
        self.seen.append(spawn.environment)
        return await super().start(spawn)


def test_a_process_sees_its_gpus_alone(plan_for: PlanFor, tmp_path: Path) -> None:
    """In place of a role a module that ends at once."""
    plan, spawner = plan_for("engine.slots=1", "engine.max_prefill_tokens=1"), Environments()
    plan = replace(plan, seats=seats_of(plan, assumed_gpus("2x80")))
    endpoints = Endpoints("mailbox", tmp_path, tmp_path, seats=plan.seats)
    (spec,) = engine_specs(plan.recipe, plan.base.path, endpoints)
    deadlines = plan.recipe.deadlines.model_copy(update={"trainer_restarts": 0})
    engine = EngineHandle.on_this_machine(spec, tmp_path, deadlines, "platform", spawner, print, Proving(), 0.0)
    trainer = TrainerLink(tmp_path / "trainer.txt", deadlines, role="platform", spawner=spawner)

    async def start_both() -> None:
        with pytest.raises(RoleDied):
            await engine.start()
        with pytest.raises(RoleDied):
            await trainer.start(trainer_spec(plan, plan.base.path, endpoints, tmp_path))
        await asyncio.gather(engine.stop(0.0), trainer.stop(0.0))

    asyncio.run(start_both())
    assert [seen["CUDA_VISIBLE_DEVICES"] for seen in spawner.seen] == ["1", "0"]
