"""Promises: an engine samples only with the whole weights of the version that it stamps, and only if that version has
answered its challenge. An error at any call of an update, in the load or in the proof, leaves either the earlier
version whole, or an engine that takes no step, and scores nothing, until a version is loaded and proven. Where only the
caller can load one, nobody waits for it.
"""

import asyncio
import contextlib
import inspect
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor

import stretto
from stretto.core.canary import Canary, Challenge
from stretto.core.errors import EngineLost, TornPublication, UnprovenWeights
from stretto.engine.native.engine import NativeEngine
from stretto.engine.native.generation import Feed, Generation
from stretto.engine.native.parameters import Parameters
from stretto.model.hf.build import build_policy
from tests.engine.answering import engine_of, request
from tests.engine.serving import Mailbox
from tests.tiny_policy import SMALL

ENGINE = str(Path(stretto.__file__).parent / "engine")
TEXT = (5, 6, 7, 8, 9, 2, 3, 4)
Weights = dict[str, Tensor]


class Fault(Exception):
    """Stands for memory that ends, a device that fails, a page that cannot be read."""


class _FailsAt:
    """Raises `Fault` at call number `call` that the engine's code makes; `made`: calls so far."""

    def __init__(self, call: int) -> None:
        self.call, self.made = call, 0

    def __enter__(self) -> "_FailsAt":
        sys.setprofile(self._look)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _look(self, frame: FrameType, event: str, _: object) -> None:
        caller = {"call": frame.f_back, "c_call": frame}.get(event)
        if frame.f_code.co_flags & inspect.CO_GENERATOR:
            return  # also called to be closed, where errors are lost
        if caller is not None and caller.f_code.co_filename.startswith(ENGINE):
            self.made += 1
            if self.made == self.call:
                raise Fault


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("doubt") / "policy"
    build_policy(SMALL, folder, seed=1)
    return folder


def published(folder: Path, form: str) -> list[Weights]:
    """Two publications in turn: whole weights, or adapters of one layer."""
    whole = engine_of(folder)._parameters._parameters
    found = []
    for seed in (1, 2):
        random = torch.Generator().manual_seed(seed)
        if form == "whole":
            found.append({name: one + 0.1 * torch.randn(one.shape, generator=random) for name, one in whole.items()})
        else:
            layer = "model.layers.0.mlp.up_proj"
            wide, narrow = whole[f"{layer}.weight"].shape
            a, b = torch.randn(2, narrow, generator=random), torch.randn(wide, 2, generator=random)
            found.append({f"{layer}.lora_A": a, f"{layer}.lora_B": b})
    return found


def known(folder: Path, publication: Mapping[str, Tensor]) -> tuple[Weights, tuple[float, ...]]:
    """The parameters after an undisturbed load, and their log-probabilities of TEXT."""
    engine = engine_of(folder)
    engine.update(1, publication)
    return {name: one.clone() for name, one in engine._parameters._parameters.items()}, next(engine.score([TEXT]))[1]


class Turns(Mailbox):
    """Every version is there: the odd ones are one publication, the even ones another."""

    def __init__(self, both: list[Weights]) -> None:
        super().__init__()
        self.both = both

    def load(self, version: int) -> Mapping[str, Tensor]:
        return self.both[version % 2]


def has(engine: NativeEngine, expected: Weights) -> bool:
    return all(torch.equal(one, expected[name]) for name, one in engine._parameters._parameters.items())


@pytest.mark.parametrize("form", ["whole", "adapters"])
@pytest.mark.parametrize("challenged", [True, False])
def test_an_error_at_any_call_of_an_update_ends_the_sampling_until_a_version_is_whole(
    small: Path, form: str, challenged: bool
) -> None:
    both = published(small, form)
    expected = [known(small, one) for one in both]
    engine = engine_of(small)
    generation = Generation(engine, Turns(both))

    def update(version: int) -> Any:
        canary = Canary(version, TEXT, expected[version % 2][1], 1)
        return asyncio.run(generation.update(version, Challenge(canary, 1e-4, 8) if challenged else None))

    update(0)
    version, doubted, faults = 0, 0, 0
    while True:
        version += 1
        if engine.idle:
            engine.add(request(f"r{version}", prompt=3, seeds=(1, 2), stop_token_ids=(), max_tokens=20))
        engine.step()
        with _FailsAt(faults + 1) as fault, contextlib.suppress(Fault):
            update(version)
        if fault.made <= faults:
            break  # it has failed at every call before
        faults += 1
        if engine.in_doubt:
            doubted += 1
            before = engine.computed
            with pytest.raises(UnprovenWeights):
                engine.step()
            assert engine.computed == before
        else:
            assert has(engine, expected[engine.version % 2][0])
        update(version)
        assert not engine.in_doubt
        assert has(engine, expected[version % 2][0])
    assert doubted > 10
    assert faults > doubted


async def test_without_a_mailbox_an_engine_in_doubt_keeps_nobody_waiting(small: Path) -> None:
    whole, feed = published(small, "whole")[0], Feed("engine")
    generation = Generation(engine_of(small))
    running = asyncio.create_task(generation.run())

    def ask(name: str) -> None:
        asked = request(name, prompt=3, stop_token_ids=(), max_tokens=25)
        generation.submit_to(feed, [asked], every_token=False)

    ask("open")
    await asyncio.sleep(0)
    with pytest.raises(NotImplementedError):  # the last parameter cannot be copied
        generation.load(1, whole | {name: one.to("meta") for name, one in [*whole.items()][-1:]})
    async with asyncio.timeout(20):
        [(_, lost)] = (await generation.next(feed))[2]
        with pytest.raises(EngineLost, match=str(lost)):
            ask("later")
        with pytest.raises(EngineLost, match=str(lost)):
            await generation.score([TEXT])
        generation.load(1, whole)
        ask("later")
        [ended] = (await generation.next(feed))[1]
        assert (ended.request, *set(ended.versions)) == ("later", 1)
        assert await generation.score([TEXT]) == [known(small, whole)[1]]
    running.cancel()


def test_weights_that_are_not_finite_fail_their_proof_and_leave_the_next_version_proven(small: Path) -> None:
    both = published(small, "whole")
    engine, canary = engine_of(small), Canary(2, TEXT, known(small, both[0])[1], 1)
    generation = Generation(engine, Turns([both[0], {name: one * torch.nan for name, one in both[1].items()}]))
    loaded = asyncio.run(generation.update(1, Challenge(Canary(1, TEXT, canary.logprobs, 1), 1e-4)))
    assert engine.in_doubt
    assert loaded.scores is not None
    assert not any(map(math.isfinite, loaded.scores.logprobs))
    with pytest.raises(EngineLost, match="may have the weights of no version"):
        asyncio.run(generation.score([TEXT]))
    asyncio.run(generation.update(2, Challenge(canary, 1e-4)))
    assert not engine.in_doubt


def test_adapters_are_not_added_to_weights_that_were_loaded_in_part() -> None:
    made = torch.nn.Linear(3, 2, bias=True)
    parameters = Parameters(made)
    adapters = {".lora_A": torch.ones(1, 3), ".lora_B": torch.ones(2, 1)}
    with pytest.raises(KeyError):
        parameters.load({"weight": torch.zeros(2, 3)})  # the bias is missing
    whole = {"weight": torch.zeros(2, 3), "bias": torch.zeros(2)}
    with pytest.raises(TornPublication, match="its base was loaded only in part"):
        parameters.check(2, adapters)
    parameters.check(2, whole)
    parameters.load(whole)
    assert torch.equal(made.weight, torch.zeros(2, 3))
