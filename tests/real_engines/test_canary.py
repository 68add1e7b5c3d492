"""A server of another make proves each version by the canary before it samples for anyone, in float32 and bfloat16.

- Honest updates are proven, whether running requests end ("recompute") or go on ("keep"); every tensor in the
  server's memory is compared with the trainer's digest, in the type of the publication and in a coarser one.
  `clients/test_more_runs.py` has a hundred.
- Where a load goes wrong and reports success, the version is refused, and the tensors that differ are named: an old
  file, a tensor that is skipped, scaled, swapped with another or rounded, the least bit flipped behind every check, a
  load that never happened, a lying version. In float32 the score alone shows it too.
- Where the cache is kept, what a request that goes on samples with a refused version is dropped.
- Entries of earlier weights in the cache are refused; where a server has no such cache, that is shown.
- Afterwards an honest load is proven."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from stretto.core.canary import AGREEING, Agreement
from stretto.core.records import GenerateRequest, Sampling
from stretto_servers.vllm import VllmServer
from tests.real_engines.serving import RealServer, engine, generate
from tests.real_engines.training import ALONE, DOWN, SPOILT, TEXT, Loads, training

UPDATES = 6
#: A request of 900 tokens lasts for 27 s and more, however fast the server is.
PACED = ("paced", "0.03")


async def proven(server: RealServer, updates: int) -> None:
    """Nothing is said of so many honest updates."""
    async with training(server) as (trainer, _):
        for version in range(1, updates + 1):
            proof = await trainer.advance()
            assert (proof.version, proof.compared) == (version, proof.tensors)
    assert (trainer.said, trainer.proving.record.refused) == ([], 0)


async def test_honest_updates_are_proven(either_server: RealServer) -> None:
    await proven(either_server, UPDATES)


async def _nothing(*arguments: object, **settings: object) -> None: ...


async def test_what_goes_wrong_in_a_load_is_refused_and_what_goes_well_is_proven(
    either_server: RealServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with training(either_server) as (trainer, served):
        loads = Loads(served._make.load, tmp_path / "spoilt")
        monkeypatch.setattr(served._make, "load", loads)
        await trainer.advance()
        for name, spoil in SPOILT.items():
            await trainer.advance()
            loads.spoil = spoil
            proof = await trainer.refused()
            assert proof.compared == proof.tensors == len(load_file(either_server.policy / "model.safetensors"))
            assert proof.evidence == ALONE.get(name, proof.evidence) != "", name
            if either_server.dtype == "float32" and name != "a bit flipped":
                assert proof.distance > 3 * proof.tolerance, name
            loads.spoil = None
        with monkeypatch.context() as patch:  # the order to load is never carried out
            patch.setattr(served._make, "load", _nothing)
            assert (await trainer.refused()).evidence
        await trainer.advance()


async def test_what_goes_wrong_in_a_servers_own_memory_is_refused(either_server: RealServer) -> None:
    """It says that it has loaded the version and has not; a bit of a layer flips when all is loaded."""
    async with training(either_server) as (trainer, _):
        await trainer.advance()
        with either_server.loads_spoilt("old"):
            assert (await trainer.refused()).evidence
        await trainer.advance()
        with either_server.loads_spoilt("flipped", DOWN.removesuffix(".weight")):
            assert (await trainer.refused()).evidence == DOWN
        await trainer.advance()


async def _keeps_the_cache(self: VllmServer, *, keep: bool) -> None:
    await self._http.exchange("POST", "/pause?mode=abort&clear_cache=false")


@pytest.mark.parametrize("installed", ["vllm"], indirect=True)
async def test_entries_of_earlier_weights_in_a_cache_are_refused(
    either_server: RealServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with training(either_server) as (trainer, _):
        await trainer.advance()
        with monkeypatch.context() as patch:
            patch.setattr(VllmServer, "pause", _keeps_the_cache)
            proof = await trainer.refused()
            assert (proof.evidence, proof.compared) == ("", proof.tensors), "its weights are right"
        await trainer.advance()


@pytest.mark.parametrize("installed", ["sglang"], indirect=True)
async def test_sglang_has_no_cache_that_could_outlive_its_weights_on_a_processor(server: RealServer) -> None:
    """A prompt that it has had is computed anew each time: `--disable-radix-cache`, without which it does not start."""
    order = {
        "input_ids": list(TEXT) * 4,
        "sampling_params": {"max_new_tokens": 2, "temperature": 1.0, "ignore_eos": True},
    }
    async with engine(server, "recompute") as (served, _):
        make: Any = served._make
        told = [await make._http.exchange("POST", "/generate", order) for _ in range(3)]
        assert [one["meta_info"]["cached_tokens"] for one in told] == [0, 0, 0]


async def test_versions_are_proven_where_the_cache_is_kept(either_server: RealServer) -> None:
    async with training(either_server, "keep") as (trainer, _):
        for _ in range(5):
            proof = await trainer.advance()
            assert proof.compared == proof.tensors > 0
    assert trainer.proving.record.refused == 0


async def test_what_a_request_goes_on_to_sample_with_a_refused_version_is_dropped(server: RealServer) -> None:
    """The cache is kept, so it runs on from one version to the next, by slow steps: it must not end before the last."""
    with server.loads_spoilt(*PACED):
        async with training(server, "keep") as (trainer, served):
            await trainer.advance()
            sampling = Sampling(max_tokens=900, stop_token_ids=())
            stream = served.submit_all([GenerateRequest("r", (5, 12, 8), (0, 1), sampling)])
            await generate(served, 40)
            with server.loads_spoilt("old"):
                await trainer.refused()
            before = served.partials({"r": [0, 0]})["r"]
            assert {version for piece in before.values() for version in piece.versions} == {1}
            await trainer.advance()
            known = [before[member].length for member in (0, 1)]
            async with asyncio.timeout(60):
                while not (new := served.partials({"r": known})):
                    assert not any((stream.ready, stream.broken)), (known, await served.health())
                    await asyncio.sleep(0.05)
            assert {version for piece in new["r"].values() for version in piece.versions} == {3}
            served.close("r")


async def test_tokens_that_a_server_has_sampled_are_those_of_the_forward_that_it_has_proven(
    either_server: RealServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It computes them again before it loads the next version, where nobody else has compared any."""
    with either_server.loads_spoilt(*PACED):
        async with training(either_server) as (trainer, served):
            agreements = list[Agreement]()
            monkeypatch.setattr(trainer.proving, "agreed", lambda found, judge: agreements.extend(found))
            await trainer.advance()
            while not agreements:
                request = GenerateRequest(f"r{trainer.version}", (5, 12, 8), tuple(range(8)), Sampling(max_tokens=900))
                stream = served.submit_all([request])
                await generate(served, 80)
                await trainer.advance()
                assert trainer.version <= 4, "it is asked once nothing was compared for two versions"
                assert not stream.broken
                served.close(request.id)
            assert agreements[0].tokens >= 32
            assert agreements[0].error < AGREEING[either_server.dtype] / 2


async def test_a_coarser_server_is_compared_with_what_was_published_in_its_type(coarse_server: RealServer) -> None:
    async with training(coarse_server) as (trainer, served):
        trainer._publish._publisher._dtype = None  # as in a run that has engines of float32 too
        for _ in range(3):
            proof = await trainer.advance()
            assert proof.compared == proof.tensors > 0
        loads = Loads(served._make.load, coarse_server.spoilt.with_suffix(".folder"))
        served._make.load = loads  # type: ignore[method-assign]
        await trainer.advance()
        loads.spoil = SPOILT["one tensor skipped"]
        assert (await trainer.refused()).evidence == DOWN
