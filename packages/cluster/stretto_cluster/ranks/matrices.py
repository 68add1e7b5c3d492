"""Division of each layer's matrices among ranks (Megatron-LM, Shoeybi et al., arXiv 1909.08053).

    x ─► q, k, v, gate, up: rows of W (outputs)  ─► heads, neurons of this rank ─► o, down: columns of W ─► sum ─► y

The tensor-parallel plan of the model's config (transformers) says how each module is divided, and torch's
`parallelize_module` divides it. Embedding, output matrix and most norms are not divided: every such rank has them in
full and computes the same.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from typing import cast

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from transformers import PreTrainedModel

from stretto.core.errors import Problem, RecipeError
from stretto.model.kernels import OneDnnLinear
from stretto.trainer.adapters import ADAPTER, adapted_layers

#: torch's parallel style for each name in a plan of transformers.
_STYLES: dict[str, Callable[[], ParallelStyle]] = {
    "colwise": ColwiseParallel,
    "rowwise": RowwiseParallel,
    "colwise_gather_output": lambda: ColwiseParallel(output_layouts=Replicate()),
    "rowwise_split_input": lambda: RowwiseParallel(input_layouts=Replicate()),
    # A norm over each head: any axis except the last may be declared as the divided axis.
    "replicated_with_grad_allreduce": lambda: SequenceParallel(sequence_dim=2, use_local_output=True),
}
_OUTPUTS, _INPUTS = ("colwise", "colwise_gather_output"), ("rowwise", "rowwise_split_input")
_TENSOR, _CONTEXT = "trainer.tensor_parallel", "trainer.context_parallel"


def divide_matrices(model: PreTrainedModel, mesh: DeviceMesh) -> None:
    """Divide the layers of `model`, and their adapters, in place over the ranks of `mesh`, by the plan of its config.
    Each rank must hold the full model, or the model on the meta device."""
    adapted = {id(layer): layer for layer in adapted_layers(model).values()}
    alike = defaultdict[str, list[nn.Module]](list)
    for name, style in list(_planned(model)):
        layer = model.base_model.get_submodule(name)
        modules = [getattr(layer, "base_layer", layer)]
        if (both := adapted.get(id(layer))) is not None:  # W and the adapter have the same inputs, or outputs
            modules.append((both.lora_B if style in _OUTPUTS else both.lora_A)[ADAPTER])
        for module in modules:
            if isinstance(module, OneDnnLinear):
                cast(nn.Linear, module).__class__ = nn.Linear  # its kernels know nothing of divided matrices
            trained = any(parameter.requires_grad for parameter in module.parameters())
            parallelize_module(module, mesh, _STYLES[style](), src_data_rank=None)
            module.requires_grad_(trained)  # torch's norms always are
        if style in _OUTPUTS:
            alike[name.rpartition(".")[0]].append(modules[0])
    for several in alike.values():
        shared = _SharedInput(mesh, len(several))
        for module in several:
            module.register_forward_pre_hook(shared, prepend=True)


class _SharedInput:
    """Forward pre-hook that passes one shared DTensor to modules called with the same tensor (query, key and value;
    gate and up). So its gradient is summed over the ranks once instead of once per module."""

    def __init__(self, mesh: DeviceMesh, modules: int) -> None:
        self._mesh, self._modules = mesh, modules
        self._last: tuple[Tensor, DTensor, int] | None = None  # input, input as DTensor, number of modules that took it

    def __call__(self, module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        given, *others = inputs
        if self._last is None or self._last[0] is not given:
            self._last = given, DTensor.from_local(given, self._mesh, (Replicate(),), run_check=False), 0
        _, shared, taken = self._last
        self._last = (given, shared, taken + 1) if taken + 1 < self._modules else None
        return (shared, *others)


def refuse_undividable(model: PreTrainedModel, tensor: int, context: int) -> None:
    """Check that `tensor` ranks can divide the matrices of a model, and `context` ranks its heads.

    Raises:
        RecipeError: the model's config has no tensor-parallel plan, or a plan with a style that is not supported; or
            a size is not divisible. The error names the numbers of ranks that are possible.
    """
    if problems := [*_tensor_problems(model, tensor), *_context_problems(model, tensor, context)]:
        raise RecipeError(problems)


def _tensor_problems(model: PreTrainedModel, tensor: int) -> Iterator[Problem]:
    if tensor == 1:
        return
    planned, kind = list(_planned(model)), type(model).__name__
    unserved = sorted({style for _, style in planned if style not in _STYLES})
    if unserved or not planned:
        plans = f"is divided in a way that is not served ({', '.join(unserved)})" if unserved else "has no plan for it"
        yield Problem(_TENSOR, f"{kind} {plans}", "1, and more ranks or trainer.context_parallel")
        return
    sizes = dict(_heads(model)) if _divides_heads(model) else {}
    for name, style in planned:
        layer = model.base_model.get_submodule(name)
        if style in _OUTPUTS + _INPUTS:
            label = f"{name.rpartition('.')[2]}'s {'outputs' if style in _OUTPUTS else 'inputs'}"
            sizes[label] = getattr(layer, "out_features" if style in _OUTPUTS else "in_features")
    yield from _undivided(_TENSOR, tensor, sizes)


def _context_problems(model: PreTrainedModel, tensor: int, context: int) -> Iterator[Problem]:
    if context > 1:
        local = tensor if _divides_heads(model) else 1
        yield from _undivided(_CONTEXT, context, {name: number // local for name, number in _heads(model)}, local)


def _undivided(place: str, count: int, sizes: dict[str, int], local: int = 1) -> Iterator[Problem]:
    """Yield a problem at `place` if `count` does not divide one of the named `sizes`, with the numbers that divide all.
    `local`: number of ranks over which the sizes were divided before."""
    if wrong := [f"{name} = {size}" for name, size in sizes.items() if size % count or not size]:
        whole = math.gcd(*sizes.values())
        fits = [str(number) for number in range(1, whole + 1) if whole % number == 0] or ["1"]
        each = f" of each of {local} ranks" if local > 1 else ""
        yield Problem(place, f"{count} does not divide {', '.join(wrong)}{each}", f"one of {', '.join(fits)}")


def _heads(model: PreTrainedModel) -> Iterator[tuple[str, int]]:
    config = model.config.get_text_config()
    heads: int = config.num_attention_heads
    yield "num_attention_heads", heads
    yield "num_key_value_heads", getattr(config, "num_key_value_heads", None) or heads


def _divides_heads(model: PreTrainedModel) -> bool:
    """Whether the plan divides attention, so that each rank computes only some heads."""
    return any(style == "colwise" and ".self_attn." in name for name, style in _planned(model))


def _planned(model: PreTrainedModel) -> Iterator[tuple[str, str]]:
    """Yield (name, style) of each module and parameter that the config's tensor-parallel plan divides, without the
    embedding, which stays whole."""
    plan: dict[str, str] = getattr(model.config.get_text_config(), "base_model_tp_plan", None) or {}
    body, embedding = model.base_model, model.get_input_embeddings()
    for name, part in (*body.named_modules(), *body.named_parameters()):
        for pattern, style in plan.items():
            if part is not embedding and fnmatchcase(name, pattern):
                yield name, style
