"""Bytes on one rank in a step of the trainer, counted without a GPU: its own code runs on tensors without numbers
(FakeTensorMode) and a process group that sends nothing, with the attention and the sizes of a GPU.

What is counted is every storage that is alive. On a GPU a gather may begin while the one before it is still held, which
adds at most one layer. gloo (`gpu=False`) copies what it gathers, and what it sums and scatters, while it does so.
"""

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.distributed.device_mesh import DeviceMesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from stretto.model.hf.layers import decoder_layers
from stretto.model.packed import attention, logprobs
from stretto.model.packed import layer as packed_layer
from stretto.model.packed.attention import PACKED_ATTENTION
from stretto.trainer import optimizer
from stretto.trainer import ranks as ranks_module
from stretto.trainer.adapters import adapt
from stretto.trainer.batch.minibatch import Minibatch, minibatch
from stretto.trainer.batch.samples import Sample
from stretto.trainer.config import TrainerConfig
from stretto.trainer.critic import Critic
from stretto.trainer.gradients import Gradients
from stretto.trainer.metrics import Meter
from stretto.trainer.objective.algorithm import AlgorithmConfig
from stretto.trainer.optimizer import UNCHANGED, Learner, Optimizer
from stretto.trainer.ranks import ALONE, Ranks, own
from stretto.trainer.reference import ReferencePolicy
from stretto_cluster.ranks import collectives
from stretto_cluster.ranks.collectives import ShardedRanks
from stretto_kernels.gpu import layer_loops as gpu_loops
from stretto_kernels.gpu import logprobs as gpu_logprobs
from stretto_kernels.steps import layer
from tests.trainer.scale.collectives import Collectives, whole_bytes
from tests.trainer.staging import staged

_aten = torch.ops.aten
#: What a step asks the numbers for; these tensors have none.
_ANSWERS: Mapping[Any, object] = {
    _aten._local_scalar_dense.default: 1.0,
    _aten.equal.default: True,
    _aten.allclose.default: True,
}


#: Collectives in which gloo has a whole copy of its own.
_COPIED = ("_allgather_base_", "_reduce_scatter_base_")


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of all storages that are alive, and their peak; `gloo`: with its copies."""

    def __init__(self, *, gloo: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._copied = _COPIED if gloo else ()
        self.now = self.peak = self.host = 0
        self._sizes: dict[int, int] = {}
        self._on_host: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _ANSWERS:
            return _ANSWERS[func]
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                self._see(own(leaf).untyped_storage())
        if func._opname in self._copied:
            self.peak = max(self.peak, self.now + whole_bytes(args))
        return out

    def _see(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._on_host:
            return
        if key not in self._sizes:
            weakref.finalize(storage, self._change, key, None)
        self._change(key, storage.nbytes())

    def _change(self, key: int, size: int | None) -> None:
        self.now += (size or 0) - self._sizes.get(key, 0)
        if size is None:
            self._sizes.pop(key, None)
        else:
            self._sizes[key] = size
        self.peak = max(self.peak, self.now)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Count storages that FSDP empties and fills again. Host memory is counted apart."""
        resize = torch.UntypedStorage.resize_

        def counted(storage: torch.UntypedStorage, size: int) -> Any:
            found = resize(storage, size)
            self._see(storage)
            return found

        zeros = ranks_module.zeros_on_host

        def on_host(like: Tensor) -> Tensor:
            before = self.now, self.peak
            held = zeros(like)
            self.now, self.peak = before
            self.host += held.untyped_storage().nbytes()
            self._on_host.add(held.untyped_storage()._cdata)  # it stays until the end
            return held

        with pytest.MonkeyPatch.context() as patch, staged(), self:
            patch.setattr(torch.UntypedStorage, "resize_", counted)
            for module in (ranks_module, collectives):
                patch.setattr(module, "zeros_on_host", on_host)
            yield


@dataclass(frozen=True)
class Counted:
    """Bytes on one rank: what stays between steps, the peak within one, what is in host memory, and the collectives
    of the step."""

    parameters: int
    moments: int
    peak: int
    host: int
    collectives: Collectives


@contextmanager
def ranks_without_machines(count: int, config: TrainerConfig, *, gpu: bool = True) -> Iterator[Ranks]:
    """Rank 0 of `count`, whose collectives send nothing; the only one of 1. `gpu`: with its attention and sizes."""
    distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=count)
    try:
        with pytest.MonkeyPatch.context() as patch:
            if gpu:
                patch.setattr(attention, "bucketed", attention._flash)
                _without_kernels(patch)
            patch.setattr(DeviceMesh, "__init__", _with_numbers(DeviceMesh.__init__))
            for sizes in (logprobs.CHUNK_LOGITS, logprobs._BLOCK) if gpu else ():
                patch.setitem(sizes, "cpu", sizes["cuda"])
            yield ShardedRanks("cpu", config, "fake") if count > 1 else ALONE
    finally:
        distributed.destroy_process_group()


def _in_place(total: Tensor | None, left: Tensor, right: Tensor) -> Tensor:
    return torch.empty(left.shape[0], right.shape[1]) if total is None else total


def _without_kernels(patch: pytest.MonkeyPatch) -> None:
    """Fuse layers as on a GPU, with kernels that do nothing: what is counted is what they are given to write to."""

    class Nothing:
        def __getitem__(self, grid: object) -> Callable[..., None]:
            return lambda *arguments, **named: None

    def fuse(model: PreTrainedModel) -> None:
        for module in decoder_layers(model):
            if (found := layer._layer_of(module, packed_layer.attend)) is not None:
                module.forward = partial(layer._forward, module, found, module.forward)

    patch.setattr(packed_layer, "bucketed", attention._flash)
    patch.setattr(layer, "_loops", lambda tensor: gpu_loops)
    patch.setattr(gpu_logprobs, "computes", lambda logits: True)
    patch.setattr(optimizer, "fuse_layers", fuse)
    patch.setattr(gpu_logprobs, "_plus_product", _in_place)
    patch.setattr(logprobs, "_is_matrix", lambda head: True)
    for module in (gpu_loops, gpu_logprobs):
        for name in ("_norm", "_norm_back", "_heads", "_heads_back", "_gate", "_gate_back", "_score", "_back"):
            patch.setattr(module, name, Nothing(), raising=False)


def _with_numbers(function: Callable[..., None]) -> Callable[..., None]:
    """The function outside FakeTensorMode: places in a mesh are computed from numbers."""

    def called(*arguments: Any, **named: Any) -> None:
        with unset_fake_temporarily():
            function(*arguments, **named)

    return called


def divided(part: Minibatch, ranks: Ranks) -> Minibatch:
    """The same samples, of which the rank computes its part of the tokens."""
    return replace(
        part,
        micro_batches=tuple(replace(micro, packed=micro.packed.divided(ranks.context)) for micro in part.micro_batches),
    )


def without_numbers(value: Any) -> Any:
    """A dataclass, or a tuple of them, with tensors that have no numbers in place of its own."""
    if isinstance(value, Tensor):
        return torch.empty(value.shape, dtype=value.dtype, device="cpu")
    if isinstance(value, tuple) and value and (is_dataclass(value[0]) or isinstance(value[0], Tensor)):
        return tuple(without_numbers(one) for one in value)
    if is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in fields(value) if field.init]
        return replace(value, **{name: without_numbers(getattr(value, name)) for name in names})
    return value


def part_of(lengths: tuple[int, ...], config: TrainerConfig) -> Minibatch:
    """A minibatch of one sample per length for each rank."""
    samples = [
        Sample(
            id=f"{number}",
            token_ids=(1,) * length,
            loss_positions=tuple(range(1, length)),
            behavior_logprobs=(-1.0,) * (length - 1),
            advantages=(1.0,) * (length - 1),
            staleness=(0,) * (length - 1),
            values=(0.0,) * (length - 1),
            returns=(0.0,) * (length - 1),
            prompt_tokens=1,
            engine="",
        )
        for number, length in enumerate(lengths)
    ]
    return minibatch(samples, config, "token_mean", max(lengths), torch.device("cpu"))


def step_bytes(
    shape: PreTrainedConfig,
    settings: Mapping[str, Any],
    tokens: int,
    *,
    reference: bool = False,
    critic: bool = False,
    micro_batches: int = 1,
    gpu: bool = True,
) -> Counted:
    """Count the last micro-batches of a step of a model of this shape, each of one sequence of `tokens` tokens."""
    config = TrainerConfig.model_validate({"device": "cpu", "minibatches": 1, **settings})
    part = part_of((tokens,) * micro_batches, config)
    with ranks_without_machines(config.ranks, config, gpu=gpu) as ranks, ExitStack() as stack:
        part = divided(part, ranks)
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        live = LiveBytes(gloo=not gpu)
        stack.enter_context(live.watching())
        algorithm = AlgorithmConfig.model_validate(
            ({"reference": {"weight": 0.1}} if reference else {})
            | ({"advantages": {"kind": "gae", "critic": {}}} if critic else {})
        )
        learner = Learner(_model(shape, config), config, UNCHANGED, ranks)
        frozen = ReferencePolicy(_model(shape, config, plain=True), config, UNCHANGED, ranks) if reference else None
        judge = Critic(_model(shape, config), config, algorithm.critic, ranks) if algorithm.critic else None
        gradients, given = Gradients(learner, algorithm, frozen), without_numbers(part)
        held: list[Optimizer] = [learner, *([judge] if judge else [])]
        for one in held:  # gradients as of micro-batches before these, and the moments of earlier steps
            _give_gradients(one)
            one.step(1e-6, 0)
            _give_gradients(one)
        live.peak = live.now
        with Collectives(ranks) as collectives:
            gradients.accumulate(given, Meter(), first=True)
            learner.step(1e-6, 0)
            if judge is not None:
                judge.fit(given, 0, version=0)
        modules = [*(one.trained for one in held), *([frozen._policy] if frozen else [])]
        parameters = sum(own(p).nbytes for module in modules for p in module.parameters())
        moments = sum(own(m).nbytes for one in held for state in one.adamw.state.values() for m in state.values())
        return Counted(parameters, moments, live.peak, live.host, collectives)


def _give_gradients(optimizer: Optimizer) -> None:
    for parameter in optimizer.trained.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)


def _model(shape: PreTrainedConfig, config: TrainerConfig, *, plain: bool = False) -> PreTrainedModel:
    """A model whose tensors have no numbers, with adapters if the config has them."""
    with unset_fake_temporarily(), torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            shape, dtype=torch.float32, attn_implementation=PACKED_ATTENTION
        ).eval()
        if config.lora is not None and not plain:
            adapt(model, config.lora)
    given: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, old in module._parameters.items():
            if old is not None and id(old) not in given:
                given[id(old)] = nn.Parameter(torch.empty(old.shape, dtype=old.dtype), requires_grad=old.requires_grad)
            if old is not None:
                module._parameters[name] = given[id(old)]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype)
    return model
