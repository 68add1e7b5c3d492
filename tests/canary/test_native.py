"""The embedded engine proves its weights before it samples.

- Honest updates are proven, each of a hundred, in float32 and bfloat16, with and without adapters.
- Whatever goes wrong behind the check of the bytes and reports success is seen, in the mailbox's hand and where weights
  are copied: the version is not live, the engine samples nothing, and the sentence names engine, version and, where
  tensors differ, their names. In float32 the log-probabilities alone show it.
- Every tensor of a version is compared, and how many were is on record; so is each copy of one that a kernel computes
  with, in which rounding would hide a tensor of the version before.
- Weights that change after their proof are found before the next load, also the last bit of one; those that were kept
  are not. The proof is taken back, and the engine is distrusted: the second time in a row for good.
- An engine that keeps KV entries although the run asks it to recompute is refused.
- A fault that is gone when the version is loaded again costs nothing but that: open completions wait meanwhile.
"""

import asyncio
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Literal

import msgspec
import pytest
import torch
from torch import Tensor

from stretto.core.errors import UnprovenWeights
from stretto.core.records import GenerateRequest, Sampling
from stretto.engine.config import EngineConfig
from stretto.engine.native import engine as native
from stretto.engine.native.engine import NativeEngine
from stretto.engine.native.parameters import Parameters
from stretto.loop.engines.proving import Proving
from stretto.model.decode.policy import DecodePolicy
from stretto.model.kernels import use_onednn
from stretto.weights.shared_memory import SharedMemorySubscriber
from stretto_kernels.steps.matmul import COPIED, Kernel, Name, fits
from tests.canary.ground import Ground, InProcess, ground
from tests.model.choosing import always

DOWN = "model.layers.0.mlp.down_proj.weight"
OTHER = "model.layers.1.mlp.down_proj.weight"
ADAPTER, OTHERS = "model.layers.0.mlp.down_proj", "model.layers.1.mlp.down_proj"

Tensors = Mapping[str, Tensor]
#: What is loaded, of the published tensors and those of the version before.
Sabotage = Callable[[Tensors, Tensors], Tensors]
Dtype = Literal["float32", "bfloat16"]


def scaled_all(tensors: Tensors, _: Tensors) -> Tensors:
    return {name: 1.02 * tensor for name, tensor in tensors.items()}


def scaled_one(tensors: Tensors, _: Tensors) -> Tensors:
    return dict(tensors) | {DOWN: 1.1 * tensors[DOWN]}


def skipped_one(tensors: Tensors, before: Tensors) -> Tensors:
    return dict(tensors) | {DOWN: before[DOWN]}


def swapped(tensors: Tensors, _: Tensors) -> Tensors:
    return dict(tensors) | {DOWN: tensors[OTHER], OTHER: tensors[DOWN]}


def kept_old(_: Tensors, before: Tensors) -> Tensors:
    return before


def rounded(tensors: Tensors, _: Tensors) -> Tensors:
    coarse = torch.bfloat16 if tensors[DOWN].dtype is torch.float32 else torch.float8_e4m3fn
    return {name: tensor.to(coarse) for name, tensor in tensors.items()}


def bit_flipped(tensors: Tensors, _: Tensors) -> Tensors:
    return dict(tensors) | {DOWN: _flipped(tensors[DOWN], -3)}


def last_bit_flipped(tensors: Tensors, _: Tensors) -> Tensors:
    return dict(tensors) | {DOWN: _flipped(tensors[DOWN], 0)}


def _flipped(tensor: Tensor, bit: int) -> Tensor:
    """One bit of one number differs; negative ones count from the sign."""
    whole = torch.int32 if tensor.dtype is torch.float32 else torch.int16
    flipped = tensor.clone()
    flipped.view(whole)[3, 3] ^= 1 << (bit % (8 * whole.itemsize))
    return flipped


def adapters_dropped(tensors: Tensors, _: Tensors) -> Tensors:
    return {name: torch.zeros_like(tensor) if name.endswith(".lora_B") else tensor for name, tensor in tensors.items()}


def adapters_twice(tensors: Tensors, _: Tensors) -> Tensors:
    return {name: 2 * tensor if name.endswith(".lora_B") else tensor for name, tensor in tensors.items()}


def adapter_skipped(tensors: Tensors, before: Tensors) -> Tensors:
    return dict(tensors) | {name: before[name] for name in (f"{ADAPTER}.lora_A", f"{ADAPTER}.lora_B")}


def adapters_swapped(tensors: Tensors, _: Tensors) -> Tensors:
    one, other = f"{ADAPTER}.lora_B", f"{OTHERS}.lora_B"
    return dict(tensors) | {one: tensors[other], other: tensors[one]}


UPDATES = 5
WHOLE = (scaled_all, scaled_one, skipped_one, swapped, kept_old, rounded, bit_flipped, last_bit_flipped)
OF_ADAPTERS = (adapters_dropped, adapters_twice, adapter_skipped, adapters_swapped, kept_old)
NAMELESS = (scaled_all, kept_old, rounded)  # too many tensors differ for the sentence to name this one
INVISIBLE = (last_bit_flipped, adapter_skipped, adapters_swapped)  # to the log-probabilities of a text
#: The mailbox's hand or where weights are copied, in which type, with adapters or without: each pair of two is tried.
GRID = [
    pytest.param(
        dtype, level, lora, id=f"{dtype}-{level}-{'adapters' if lora else 'whole'}", marks=[pytest.mark.long] * even
    )
    for dtype in ("float32", "bfloat16")
    for level in ("mailbox", "copy")
    for lora in (False, True)
    for even in [((dtype == "float32") + (level == "copy") + lora) % 2 == 0]
]


def sabotage(monkeypatch: pytest.MonkeyPatch, how: Sabotage, level: str) -> None:
    """From now on what is loaded is something else than what was published, and nothing says so."""
    copy, hand, before = Parameters.load, SharedMemorySubscriber.load, dict[int, Tensors]()

    def copied(self: Parameters, tensors: Tensors) -> None:
        held = self._adapters or self._parameters
        copy(self, how(tensors, {name: tensor.detach().clone() for name, tensor in held.items()}))

    def handed(self: SharedMemorySubscriber, version: int) -> Tensors:
        if version - 1 not in before:
            before[version - 1] = {name: tensor.clone() for name, tensor in hand(self, version - 1).items()}
        return how(hand(self, version), before[version - 1])

    if level == "copy":
        monkeypatch.setattr(Parameters, "load", copied)
    else:
        monkeypatch.setattr(SharedMemorySubscriber, "load", handed)


def assert_refused(one: Ground, how: str = "") -> None:
    with pytest.raises(UnprovenWeights, match=rf"engine-0: has not proven version {one.trainer.version}:"):
        one.load()
    assert not one.newest.proven, how
    assert one.sampled_in(0.02) == 0, how
    assert "loads it again" in one.said[-1]
    (proven,) = one.proving.record.proven
    assert all(last < one.trainer.version for _, last in proven.ranges), how


@pytest.mark.parametrize("updates", [UPDATES, pytest.param(100, marks=pytest.mark.long)])
@pytest.mark.parametrize("lora", [False, True], ids=["whole", "adapters"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_honest_updates_are_proven(tmp_path: Path, dtype: Dtype, *, lora: bool, updates: int) -> None:
    with ground(tmp_path, dtype, lora=lora) as one:
        one.publish()
        assert one.load() == 0
        for version in range(1, updates + 1):
            assert one.advance() == version
        record = one.proving.record
        assert (record.refused, one.said) == (0, [])
        assert record.proven[0].ranges == ((0, updates),)
        assert one.newest.compared == one.newest.tensors >= len(one.engine._parameters._parameters)
        assert one.sampled_in(20.0) > 0


@pytest.mark.parametrize(("dtype", "level", "lora"), GRID)
def test_what_is_not_what_was_published_is_refused(tmp_path: Path, dtype: Dtype, level: str, lora: bool) -> None:
    """One fault after the other; between two of them the version is loaded as it was published, and is proven."""
    with ground(tmp_path, dtype, lora=lora) as one:
        one.publish()
        one.load()
        one.advance()
        for how in OF_ADAPTERS if lora else WHOLE:
            one.learn()
            one.publish()
            with pytest.MonkeyPatch.context() as patch:
                sabotage(patch, how, level)
                assert_refused(one, how.__name__)
            named = "lora_" if lora else "down_proj"
            assert named in one.newest.evidence or (how in NAMELESS and one.newest.evidence), how
            if dtype == "float32" and how not in INVISIBLE:
                assert one.newest.distance > one.newest.tolerance, f"{how}: the log-probabilities alone show it"
            assert one.load() == one.trainer.version, how
            assert one.newest.proven, how


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_adapters_are_added_to_is_compared_as_well(tmp_path: Path, dtype: Dtype) -> None:
    """The sum with the adapters, the weight below it, and a weight without adapters."""
    with ground(tmp_path, dtype, lora=True) as one:
        one.publish()
        one.load()
        one.advance()
        parameters, name = one.engine._parameters, f"{ADAPTER}.weight"
        named, norm = parameters._parameters, "model.norm.weight"
        for held, differing in ((named[name], {name}), (parameters._bases[ADAPTER], {name}), (named[norm], {norm})):
            whole = held.clone()
            held.copy_(_flipped(held.reshape(-1, held.shape[-1] if held.dim() > 1 else 8), 0).view(held.shape))
            found, compared = parameters.differing(one.proving._canaries[1].digests)
            assert (set(found), compared) == (differing, one.newest.tensors)
            held.copy_(whole)
        lost = {"of.another": one.proving._canaries[1].digests[name]}
        assert parameters.differing(lost) == (("of.another",), 1)


@pytest.mark.parametrize(
    ("dtype", "kernel"), [("float32", "panels"), ("float32", "packed"), *(("bfloat16", kernel) for kernel in COPIED)]
)
def test_a_copy_of_a_weight_that_a_kernel_has_kept_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: Dtype, kernel: Name
) -> None:
    if not fits(kernel, getattr(torch, dtype)):
        pytest.skip(f"{kernel} is not for {dtype} on this processor")
    monkeypatch.setattr(native, "use_onednn", partial(use_onednn, chooser=always(kernel)))
    renewed = Kernel.prepared
    with ground(tmp_path, dtype) as one:
        one.publish()
        one.load()
        one.advance()
        weight = one.engine._parameters._parameters[DOWN]

        def keeps(self: Kernel, given: Tensor) -> Tensor:
            kept = self._prepared if given is weight else None
            return renewed(self, given) if kept is None else kept

        with monkeypatch.context() as patch:
            patch.setattr(Kernel, "prepared", keeps)
            one.learn()
            one.publish()
            assert_refused(one)
        assert one.newest.evidence == f"{DOWN} (copy)"
        assert one.load() == one.trainer.version
        assert one.newest.proven


def test_a_version_number_that_grows_without_a_load_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def lies(self: NativeEngine, version: int, tensors: Tensors, since: float | None = None) -> None:
        self.version = version

    with ground(tmp_path) as one:
        one.publish()
        one.load()
        monkeypatch.setattr(NativeEngine, "update", lies)
        one.learn()
        one.publish()
        assert_refused(one)


def test_wrong_weights_from_the_first_load_on_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is measured at the start is no excuse."""
    sabotage(monkeypatch, scaled_all, "copy")
    with ground(tmp_path) as one:
        one.learn()
        one.publish()
        with pytest.raises(UnprovenWeights):
            one.load()
        assert one.newest.distance > one.newest.tolerance


def test_a_cache_that_outlives_its_weights_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with ground(tmp_path) as one:
        one.publish()
        one.load()
        one.engine.add(GenerateRequest("a", (5, 6, 7), (1, 2), Sampling(max_tokens=64)))
        for _ in range(4):
            one.engine.step()
        monkeypatch.setattr(DecodePolicy, "clear", lambda self: None)
        one.learn()
        one.publish()
        with pytest.raises(UnprovenWeights, match="the KV cache of 2 completions"):
            one.load()


@pytest.mark.parametrize(("dtype", "lora"), [("float32", False), ("bfloat16", True)], ids=["whole", "adapters"])
def test_weights_that_change_after_their_proof_are_found_at_the_next_load(
    tmp_path: Path, dtype: Dtype, *, lora: bool
) -> None:
    with ground(tmp_path, dtype, lora=lora) as one:
        ended, withdrawn = list[tuple[str, bool]](), list[tuple[str, int]]()
        one.proving.distrust = lambda doubt, final: ended.append((doubt.problem, final))
        one.proving.withdraw = lambda engine, version, reason: withdrawn.append((engine, version))
        one.publish()
        one.load()
        for changes in (False, True, True, False, True):
            if changes:
                held = one.engine._parameters._parameters[DOWN]
                with torch.no_grad():
                    held.copy_(_flipped(held, 0))
            one.advance()
        told = "has changed its weights after it had proven version {}: " + DOWN
        assert ended == [(told.format(1), False), (told.format(2), True), (told.format(4), False)]
        assert withdrawn == [("engine-0", version) for version in (1, 2, 4)]
        record = one.proving.record
        assert [(proof.version, proof.proven, proof.evidence) for proof in record.withdrawn] == [
            (version, False, DOWN) for version in (1, 2, 4)
        ]
        assert (record.refused, one.newest.proven) == (3, True)
        resumed = Proving()
        resumed.restore(record)
        assert resumed.record == record


@pytest.mark.parametrize("call", [(Parameters, "load"), (NativeEngine, "prove")], ids=["load", "prove"])
def test_what_was_found_before_a_load_that_raises_is_told_with_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: tuple[type, str]
) -> None:
    def raises(*given: object, **rest: object) -> None:
        raise MemoryError("no room for it")

    with ground(tmp_path) as one:
        withdrawn = list[int]()
        one.proving.withdraw = lambda engine, version, reason: withdrawn.append(version)
        one.publish()
        one.load()
        held = one.engine._parameters._parameters[DOWN]
        with torch.no_grad():
            held.copy_(_flipped(held, 0))
        with monkeypatch.context() as broken:
            broken.setattr(*call, raises)
            with pytest.raises(MemoryError):
                one.advance()
        one.load()
        one.advance()
        assert withdrawn == [0]


def test_an_engine_that_keeps_its_cache_unlike_asked_is_refused(tmp_path: Path) -> None:
    asked = EngineConfig().model_dump_json()
    with ground(tmp_path, on_update="keep") as one:
        one.spec = msgspec.structs.replace(one.spec, config=asked)
        one.publish()
        one.load()
        one.engine.add(GenerateRequest("a", (5, 6, 7), (1, 2), Sampling(max_tokens=64)))
        one.engine.step()
        one.learn()
        one.publish()
        with pytest.raises(UnprovenWeights, match="the KV cache of 2 completions"):
            one.load()


def test_a_load_that_goes_well_the_second_time_is_proven_and_what_is_open_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load, times = Parameters.load, iter(range(9))

    def at_first(self: Parameters, tensors: Tensors) -> None:
        load(self, scaled_all(tensors, tensors) if next(times) == 0 else tensors)

    with ground(tmp_path) as one:
        one.publish()
        one.load()
        one.learn()
        one.publish()
        monkeypatch.setattr(Parameters, "load", at_first)
        request = GenerateRequest("a", (5, 6), (1,), Sampling(max_tokens=60, stop_token_ids=()))

        async def goes_on() -> None:
            stream, running = one.generation.submit_all([request]), asyncio.create_task(one.generation.run())
            await one.proving.load(one.spec, InProcess(one.generation), 1)  # type: ignore[arg-type]  # a part
            while stream.missing and not running.done():
                await asyncio.sleep(0.001)
            assert not running.done(), "in doubt it waits"
            running.cancel()

        asyncio.run(asyncio.wait_for(goes_on(), 60))
        one.generation.stopping = False
        assert len(one.said) == 1
        assert one.newest.proven
        assert one.proving.record.refused == 1
        assert one.sampled_in(20.0) > 0
