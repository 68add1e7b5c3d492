"""Promises of the planner's costs, worked by hand on a machine of round numbers:

- a decode step reads its weights once, its cache once, and multiplies each row, whichever is longer of weights and
  products; tensor parallelism divides all of it and adds two reductions in each layer;
- a training step is three forward passes, one more with activation checkpointing, and a share for the proximal policy,
  one for a reference policy and four for a critic; ranks divide it, and gather the parameters where that takes longer;
- memory is that of weights, gradients, moments and activations on one side, of weights and KV cache on the other."""

from dataclasses import replace
from typing import Any

import msgspec
import pytest

from stretto.engine.config import EngineConfig
from stretto.model.hf.shape import ModelShape
from stretto.rollout.config import RolloutConfig
from stretto.trainer.config import TrainerConfig
from stretto.trainer.memory import rank_memory
from stretto_foresight.planner.costs import Costs, Job, Layout, Memory
from stretto_foresight.planner.lengths import LogNormalLengths
from stretto_foresight.planner.machine import MachineProfile

# Body 2,000 weights and 1,000 of the embedding; a token has 2 * 2 layers * 1 head * 10 * 4 bytes = 160 in the cache.
SHAPE = ModelShape(3000, 2, 20, 2, 1, 10, 50, tied=True)
ROUND = MachineProfile(
    name="round",
    memory_gib=1.0,
    decode_flops=6000.0,
    prefill_flops=3000.0,
    train_flops=1000.0,
    weight_bandwidth=12_000.0,
    cache_bandwidth=1600.0,
)
JOB = Job(
    shape=SHAPE,
    lengths=LogNormalLengths(8, 0.0, 16, 2),
    rollout=RolloutConfig(batch_size=2, group_size=2),
    engine=EngineConfig(max_prefill_tokens=100),
    trainer=TrainerConfig(minibatches=1, micro_batch_tokens=10),
    longest=18,
)


def test_a_decode_step_is_the_longer_of_weights_and_products_and_its_cache() -> None:
    """3,000 weights are 12,000 bytes, a second; two operations of each and row, a second each; 10 tokens, a second."""
    costs = Costs(JOB, ROUND, Layout(1, 1))
    assert costs.decode(1, 0) == pytest.approx(1.0)
    assert costs.decode(3, 0) == pytest.approx(3.0)
    assert costs.decode(3, 10) == pytest.approx(4.0)


def test_tensor_parallelism_divides_a_step_and_adds_its_reductions() -> None:
    """Half of 3 seconds, and all of the cache's, whose only head both devices have; 2 layers * 2 reductions, each of
    2 * 3 rows * 20 wide * 4 bytes / 2 at 240 bytes/s."""
    machine = ROUND.__class__(**{**{f: getattr(ROUND, f) for f in ROUND.__struct_fields__}, "link_bandwidth": 240.0})
    assert Costs(JOB, machine, Layout(1, 1, tensor=2)).decode(3, 10) == pytest.approx(1.5 + 1.0 + 4 * 1.0)


def test_a_prefill_multiplies_every_token_and_its_attention() -> None:
    """10 tokens through 2,000 weights, one through the 1,000 of the output; attention 2 * 100 * 20 wide * 2 layers."""
    products = 2 * (2000 * 10 + 1000) + 2 * 100 * 20 * 2
    assert Costs(JOB, ROUND, Layout(1, 1)).prefill([10]) == pytest.approx(products / 3000)


def test_training_is_three_passes_and_a_half_for_the_proximal_policy() -> None:
    one = 2 * 3000 * 20 + 2 * (100 + 100) * 20 * 2
    sequences = [10, 10]
    assert Costs(JOB, ROUND, Layout(1, 1)).train(sequences) == pytest.approx(3 * one / 1000)
    saving = JOB.with_settings({}, {}, {"activation_checkpointing": True})
    assert Costs(saving, ROUND, Layout(1, 1)).train(sequences) == pytest.approx(4 * one / 1000)
    decoupled = replace(JOB, recomputes=True).with_settings({}, {}, {"minibatches": 2})
    assert Costs(decoupled, ROUND, Layout(1, 1)).train(sequences) == pytest.approx(3.5 * one / 1000)


@pytest.mark.parametrize(
    ("changes", "proximal", "update"),
    [
        ({"refers": "loss"}, 0, 4),
        ({"refers": "reward"}, 1, 3),
        ({"refers": "loss", "reference": msgspec.structs.replace(SHAPE, parameters=6000)}, 0, 5),
        ({"critic": True}, 1, 6),
    ],
    ids=["in the loss", "in the reward", "twice as large", "critic"],
)
def test_a_reference_is_a_pass_more_and_a_critic_four(changes: dict[str, Any], proximal: float, update: float) -> None:
    one = (2 * 3000 * 20 + 2 * (100 + 100) * 20 * 2) / 1000
    found = Costs(replace(JOB, **changes), ROUND, Layout(1, 1)).training([10, 10])
    assert found == pytest.approx((0, proximal * one, update * one, 0))


def test_ranks_wait_for_their_parameters_where_that_takes_longer() -> None:
    """Each of two ranks gets half of 12,000 bytes, three times for its only micro-batch of 10 tokens; in bfloat16 of
    6,000 twice, and of 12,000 once for gradients in float32."""
    slow = ROUND.__class__(**{**{f: getattr(ROUND, f) for f in ROUND.__struct_fields__}, "link_bandwidth": 10.0})
    assert Costs(JOB, slow, Layout(1, 2)).train([10, 10]) == pytest.approx(3 * 6000 / 10)
    half = JOB.with_settings({}, {}, {"dtype": "bfloat16"})
    assert Costs(half, slow, Layout(1, 2)).train([10, 10]) == pytest.approx((2 * 3000 + 6000) / 10)
    assert Costs(half, slow, Layout(1, 2)).memory().trainer * 2**30 == rank_memory(SHAPE, half.trainer, 2, 18).total


def test_ranks_that_divide_a_layer_wait_for_their_activations() -> None:
    """Of 20 tokens, two ranks: 4 sums of 2 layers, of 20 * 20 numbers of 4 bytes, which a ring sends once each; half of
    2 * 2 exchanges of 10 tokens, of query and result of 20 numbers each, key and value of 10."""
    slow = msgspec.structs.replace(ROUND, link_bandwidth=10.0)
    alone = Costs(JOB, ROUND, Layout(1, 2)).train([10, 10])
    matrices = JOB.with_settings({}, {}, {"tensor_parallel": 2, "micro_batch_tokens": 20})
    assert Costs(matrices, slow, Layout(1, 2)).train([10, 10]) == pytest.approx(alone + 4 * 2 * 20 * 20 * 4 / 10)
    shared = JOB.with_settings({}, {}, {"context_parallel": 2, "micro_batch_tokens": 20})
    gathered = 3 * 6000 / 10
    exchanged = 2 * 2 * 10 * (2 * 20 + 2 * 10) * 4 / 2
    assert Costs(shared, slow, Layout(1, 2)).train([10, 10]) == pytest.approx(gathered + exchanged / 10)


def test_memory_is_that_of_both_sides() -> None:
    """A rank: 16 bytes a parameter, and what a step needs beside them (`trainer.memory`). An engine: its weights, and
    128 slots of 18 tokens in the cache, which are 3/4 full."""
    memory = Costs(JOB, ROUND, Layout(1, 1)).memory()
    assert memory.trainer * 2**30 == rank_memory(SHAPE, JOB.trainer, 1, 18).total > 48_000
    assert memory.engine * 2**30 == pytest.approx(12_000)
    assert memory.cache * 2**30 == pytest.approx(128 * 18 * 160 * 4 / 3)
    assert memory.missing < 0
    assert Costs(JOB, ROUND, Layout(1, 4)).memory().trainer < memory.trainer


def test_an_engine_needs_room_for_its_longest_completion() -> None:
    """12,000 bytes of weights fit nine tenths of 13,400; 18 tokens of 160 bytes, in slots that are 3/4 full, do not."""
    costs = Costs(JOB, msgspec.structs.replace(ROUND, memory_gib=13_400 / 2**30), Layout(1, 1))
    assert costs.memory().generation * 2**30 == pytest.approx(12_000 + 18 * 160 * 4 / 3)
    assert costs.cache_tokens() == pytest.approx(60 / 160 * 3 / 4)
    assert Memory(trainer=5, engine=11, cache=1, available=12, completion=3).missing == 2


def test_heads_of_the_cache_are_replicated_where_there_are_fewer_than_devices() -> None:
    """Four heads of 10 numbers: a device of two has half of 640 bytes a token; of eight, a quarter as of four. Slots
    are 3/4 full."""
    four = replace(JOB, shape=ModelShape(3000, 2, 20, 8, 4, 10, 50, tied=True))
    wanted = {many: Costs(four, ROUND, Layout(1, 1, many)).memory().cache * 2**30 * 3 / 4 for many in (1, 2, 4, 8)}
    assert wanted == pytest.approx({1: 128 * 18 * 640, 2: 128 * 18 * 320, 4: 128 * 18 * 160, 8: 128 * 18 * 160})


def test_the_shape_of_a_known_model() -> None:
    """Qwen2.5-7B: a token's keys and values are 2 * 28 layers * 4 heads * 128 * 2 bytes."""
    shape = ModelShape(7_615_616_512, 28, 3584, 28, 4, 128, 152_064, tied=False)
    assert shape.body == 7_615_616_512 - 2 * 152_064 * 3584
    assert shape.cache_bytes("bfloat16") == 57_344
    assert shape.width == 3584
