"""Models that begin without memory, and what several ranks make of them."""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedModel

from stretto.core.records import Sampling
from stretto.model.hf.layers import decoder_layers
from stretto.model.hf.skeleton import skeleton
from stretto.model.packed.attention import PACKED_ATTENTION
from stretto.trainer.config import TrainerConfig
from stretto.trainer.messages import SavePolicy
from stretto.trainer.optimizer import UNCHANGED, Policy
from stretto.trainer.ranks import Ranks, own
from stretto.trainer.roles.trainer import TrainerRole
from stretto_cluster.ranks.rank import GatheringPublisher
from tests.trainer.batches import LONGEST
from tests.trainer.tiny import spec_of

SAVED = {"lora": {"rank": 2}, "save_dtype": "bfloat16"}
FIRST = "qwen3"


def unloaded(folder: Path) -> PreTrainedModel:
    return skeleton(folder, PACKED_ATTENTION)


def held_by(model: nn.Module, ranks: Ranks) -> Mapping[str, torch.Tensor]:
    """Gather all parameters and buffers of a model, by name."""
    held = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {name: ranks.full_tensor(one.detach()) for name, one in held.items()}


def filled(folder: Path, ranks: Ranks) -> Mapping[str, torch.Tensor]:
    policy = Policy(unloaded(folder), TrainerConfig(), UNCHANGED, ranks)
    ranks.shard(policy, policy.model)
    return held_by(policy.model, ranks)


def save(folder: Path, ranks: Ranks, saved: Path) -> None:
    """Load a policy with adapters as the trainer's process does, and save it."""
    config = TrainerConfig.model_validate({"ranks": ranks.count, "minibatches": 1, **SAVED})
    spec = spec_of(folder, config, Sampling(max_tokens=LONGEST))
    TrainerRole(spec, GatheringPublisher(), ranks, lambda told: None).carry_out(SavePolicy(folder=str(saved)))


def resident(field: str) -> int:
    """Bytes of a field of this process's status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{field}:"))


def beyond_the_shards(folder: Path, ranks: Ranks) -> tuple[int, int, int]:
    """Bytes of this rank at the peak of loading, beyond its shards; those of one layer, and of the shards."""
    policy = Policy(unloaded(folder), TrainerConfig(), UNCHANGED, ranks)
    layer = sum(parameter.nbytes for parameter in decoder_layers(policy.model)[0].parameters())
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from now on
    ranks.shard(policy, policy.model)
    shards = sum(own(parameter).nbytes for parameter in policy.model.parameters())
    return resident("VmHWM") - before - shards, layer, shards
