"""Mixtures of experts in half precision: rounding sends a token to other experts, which is no fault.

- Honest updates are proven, though single tokens are far away; the trainer says that its model has experts.
- Whatever is not as published is refused all the same, by the digests, down to one tensor.
- The text alone shows gross faults.
- One token that jumps is within the tolerance, in a mixture only; in float32 where every tensor was compared only.
  Records from before mixtures were told apart are read as of models without experts.
"""

from pathlib import Path
from typing import Literal

import msgspec
import pytest
import torch

from stretto.core.canary import Canary, Challenge, Scores, TensorDigest, distance, spare
from stretto.core.errors import UnprovenWeights
from stretto.engine.native.engine import NativeEngine
from stretto.loop.engines import proving
from tests.canary.ground import MIXTURES, ground
from tests.canary.test_native import Sabotage, Tensors, assert_refused, kept_old, sabotage, scaled_all

DOWN = "model.layers.0.mlp.experts.down_proj"
OTHER = "model.layers.1.mlp.experts.down_proj"
UPDATES = 6
LOGPROBS = tuple(-0.5 - place / 10 for place in range(63))


def skipped_one(tensors: Tensors, before: Tensors) -> Tensors:
    return dict(tensors) | {DOWN: before[DOWN]}


def swapped(tensors: Tensors, _: Tensors) -> Tensors:
    return dict(tensors) | {DOWN: tensors[OTHER], OTHER: tensors[DOWN]}


def rolled(tensors: Tensors, _: Tensors) -> Tensors:
    """Rows of every matrix stand one place off."""
    return {name: tensor.roll(1, 0) if tensor.dim() > 1 else tensor for name, tensor in tensors.items()}


def experts_zeroed(tensors: Tensors, _: Tensors) -> Tensors:
    return {name: torch.zeros_like(tensor) if "experts" in name else tensor for name, tensor in tensors.items()}


FAULTS: tuple[Sabotage, ...] = (skipped_one, scaled_all, swapped, kept_old)


def assert_proven(
    tmp_path: Path, mixture: str, dtype: Literal["float32", "bfloat16", "float16"], updates: int, **rest: object
) -> None:
    with ground(tmp_path, dtype, mixture=mixture, **rest) as one:  # type: ignore[arg-type]  # layers, trained
        one.publish()
        assert one.load() == 0
        for version in range(1, updates + 1):
            assert one.advance() == version
        assert (one.proving.record.refused, one.said) == (0, [])
        assert one.newest.compared == one.newest.tensors
        assert one.proving._canaries[updates].routed
        (worst,) = one.proving.record.worst
        print(f"\n{mixture} {dtype} {rest}: at most {worst.distance / worst.tolerance:.2f} of the tolerance")
        assert worst.distance < worst.tolerance / 2


@pytest.mark.parametrize("mixture", MIXTURES)
def test_honest_updates_of_a_mixture_are_proven(tmp_path: Path, mixture: str) -> None:
    assert_proven(tmp_path, mixture, "bfloat16", UPDATES)


@pytest.mark.long
@pytest.mark.parametrize("mixture", MIXTURES)
@pytest.mark.parametrize(
    ("dtype", "trained", "layers", "updates"),
    [
        ("bfloat16", "float32", 2, 100),
        ("bfloat16", "bfloat16", 2, 40),
        ("float16", "float32", 2, 40),
        ("float32", "float32", 2, 40),
        ("float32", "bfloat16", 2, 40),
        ("bfloat16", "float32", 12, 30),
    ],
)
def test_many_honest_updates_of_a_mixture_are_proven(
    tmp_path: Path,
    mixture: str,
    dtype: Literal["float32", "bfloat16", "float16"],
    trained: str,
    layers: int,
    updates: int,
) -> None:
    assert_proven(tmp_path, mixture, dtype, updates, layers=layers, trained=trained)


def test_what_is_not_what_was_published_of_a_mixture_is_refused(tmp_path: Path) -> None:
    with ground(tmp_path, "bfloat16", mixture="mixtral") as one:
        one.publish()
        one.load()
        for how in FAULTS:
            one.learn()
            one.publish()
            with pytest.MonkeyPatch.context() as patch:
                sabotage(patch, how, "copy")
                assert_refused(one, how.__name__)
            assert one.newest.evidence, how
            assert one.load() == one.trainer.version, how


@pytest.mark.parametrize("how", [rolled, experts_zeroed], ids=lambda how: how.__name__)
def test_a_mixtures_text_shows_gross_faults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: Sabotage) -> None:
    with ground(tmp_path, "bfloat16", mixture="mixtral") as one:
        one.publish()
        one.load()
        sabotage(monkeypatch, how, "copy")
        one.learn()
        one.publish()
        with pytest.raises(UnprovenWeights):
            one.load()
        print(f"\n{how.__name__}: {one.newest.distance:.2g} nats, {one.newest.tolerance:.2g} allowed")
        assert one.newest.distance > one.newest.tolerance


@pytest.mark.parametrize("decoded", [False, True])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_token_that_jumps_is_within_the_tolerance_of_a_mixture_alone(dtype: str, *, decoded: bool) -> None:
    """0.8 nats are the farthest that was seen of one token; of the decoded ones there are two."""
    jumped = Scores(tuple(x - 0.8 * (at == (61 if decoded else 5)) for at, x in enumerate(LOGPROBS)), decoded=2)
    found = {}
    for routed in (False, True):
        canary = Canary(1, tuple(range(64)), LOGPROBS, depth=2, routed=routed)
        found[routed] = distance(canary, jumped) <= proving._UNITS[dtype].least * canary.unit(dtype)
    assert found == {False: dtype == "bfloat16" and not decoded, True: True}
    fine = Canary(1, tuple(range(64)), LOGPROBS, depth=2, routed=True)
    assert distance(fine, jumped) > proving._UNITS["float32"].first * fine.unit("float32")


def jumps(monkeypatch: pytest.MonkeyPatch, nats: float, places: slice) -> None:
    """Tokens of the text are so far away from now on, though the weights are right."""
    prove = NativeEngine.prove

    def other(engine: NativeEngine, canary: Canary, *, keeps: bool) -> Scores:
        scores, moved = prove(engine, canary, keeps=keeps), range(len(canary.logprobs))[places]
        logprobs = tuple(x - nats * (at in moved) for at, x in enumerate(scores.logprobs))
        return msgspec.structs.replace(scores, logprobs=logprobs)

    monkeypatch.setattr(NativeEngine, "prove", other)


@pytest.mark.parametrize("place", [5, -1], ids=["together", "decoded"])
def test_in_float32_a_token_that_jumps_is_within_the_tolerance_of_a_mixture_whose_tensors_are_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: int
) -> None:
    jumps(monkeypatch, 0.8, slice(place, place + 1 or None))
    for mixture in ("mixtral", ""):
        with ground(tmp_path / (mixture or "dense"), mixture=mixture) as one:
            one.publish()
            if mixture:
                assert one.load() == 0
                assert one.advance() == 1
                assert one.sampled_in(20.0) > 0
                assert one.newest.proven
                assert one.newest.distance <= one.newest.tolerance
            else:
                with pytest.raises(UnprovenWeights):
                    one.load()


def test_in_float32_a_mixture_with_every_token_off_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its tensors are as published, and another thing is computed with them."""
    with ground(tmp_path, mixture="mixtral") as one:
        one.publish()
        one.load()
        jumps(monkeypatch, 0.15, slice(None))
        one.learn()
        one.publish()
        assert_refused(one)
        assert (one.newest.evidence, one.newest.compared) == ("", one.newest.tensors)


def test_where_not_every_tensor_was_compared_the_limit_of_float32_stays() -> None:
    digests = {name: TensorDigest("F32", "0") for name in ("a", "b")}
    canary = Canary(1, tuple(range(64)), LOGPROBS, depth=2, routed=True, digests=digests)
    challenge = Challenge(canary, 1e-5, spare=spare("float32", routed=True))
    jumped = tuple(x - 0.8 * (at == 5) for at, x in enumerate(LOGPROBS))
    found = [challenge.is_answered(Scores(jumped, decoded=2, compared=compared)) for compared in range(3)]
    assert found == [False, False, True]
    assert not challenge.is_answered(Scores(jumped, decoded=2, compared=2, differing=("a",)))
    assert not Challenge(canary, 1e-5).is_answered(Scores(jumped, decoded=2, compared=2))


def test_a_canary_of_before_mixtures_were_told_apart_is_read() -> None:
    told = msgspec.to_builtins(Canary(1, (2, 3), (-1.0,), depth=2))
    del told["routed"]
    assert msgspec.convert(told, Canary) == Canary(1, (2, 3), (-1.0,), depth=2, routed=False)
