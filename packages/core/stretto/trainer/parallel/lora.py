"""The parts of adapters that use peft: the adapted layers, and the file format."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import cast

import peft
import torch
from safetensors.torch import save_file
from torch import nn
from transformers import PreTrainedModel

from stretto.model.hf.filling import own, own_slices
from stretto.model.hf.layers import linear_layers
from stretto.trainer.config import LoraConfig
from stretto.trainer.parallel.adapters import ADAPTER, adapted_layers, matrices
from stretto.trainer.parallel.ranks import Ranks

_SEED = 20_210_617  # A is the same on every rank and after every restart


def adapt(model: PreTrainedModel, config: LoraConfig, *, seed: int = _SEED, head: bool = False) -> None:
    """Freeze the model, and add an adapter to each linear layer that `config` names. `head`: also to the output matrix.
    `seed`: seed of the random A."""
    wanted = [name for name in linear_layers(model) if config.targets(name)]
    if head:
        wanted += [name for name, module in model.named_modules() if module is model.get_output_embeddings()]
    with torch.random.fork_rng(devices=()), warnings.catch_warnings():
        # An embedding tied to the output matrix gets no adapter: only the output matrix does.
        warnings.filterwarnings("ignore", message=".*ensure_weight_tying")
        torch.manual_seed(seed)
        peft.inject_adapter_in_model(_peft_config(config, wanted), model)


@torch.no_grad()
def draw_adapters(model: nn.Module, seed: int = _SEED) -> None:
    """Initialise adapters that were added to a model on the meta device, with the same numbers as `adapt`. Each rank
    draws one full A at a time, and keeps the rows of its shard."""
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(seed)
        for layer in adapted_layers(model).values():
            a, b = (cast(nn.Linear, both[ADAPTER]) for both in (layer.lora_A, layer.lora_B))
            whole = nn.Linear(a.in_features, a.out_features, bias=False).weight
            nn.Linear(b.in_features, b.out_features, bias=False)  # peft makes both, and draws A again
            nn.init.kaiming_uniform_(whole, a=math.sqrt(5))
            own(a.weight).copy_(whole[own_slices(a.weight)])
            own(b.weight).zero_()


def gather_adapters(
    model: nn.Module, config: LoraConfig, ranks: Ranks, inside: str = "adapter"
) -> Callable[[Path], None]:
    """Gather the adapters from the ranks; every rank must call it. Returns a function for one rank to call: it writes
    the adapters in peft's format into the folder `inside` of the policy folder that it is given."""
    layers = {name: matrices(layer, ranks) for name, layer in adapted_layers(model).items()}

    def write(policy: Path) -> None:
        tensors = {
            f"base_model.model.{name}.{kind}.weight": matrix.cpu()
            for name, both in layers.items()
            for kind, matrix in zip(("lora_A", "lora_B"), both, strict=True)
        }
        (folder := policy / inside).mkdir(parents=True, exist_ok=True)
        save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
        _peft_config(config, layers).save_pretrained(str(folder))

    return write


def _peft_config(config: LoraConfig, names: Iterable[str]) -> peft.LoraConfig:
    return peft.LoraConfig(r=config.rank, lora_alpha=config.alpha, target_modules=sorted(names), task_type="CAUSAL_LM")
