"""Promises of the adapter's process: the server that it starts does not get the key of its own clients, and has its
port to itself; the folder of a model that is served as it is stays as it was; what a make computes or tells otherwise
than stretto, as log-probabilities beside filters or attention beyond a window, is not asked of it."""

import itertools
import os
import sys
from pathlib import Path
from typing import Any

import pytest

import stretto
from stretto.core.errors import RefusedRequest, RoleDied, RoleFailed
from stretto.core.records import GenerateRequest, Sampling
from stretto.engine.config import CAPABILITIES, EngineConfig
from stretto.engine.wire import ENGINE_KEY, EngineSpec
from stretto.model.hf.build import build_policy
from stretto_servers.http import JsonServer
from stretto_servers.make import Launch
from stretto_servers.role import _engine, play
from stretto_servers.worker.advance import Advance
from tests.servers.toy import ToyServer
from tests.tiny_policy import SMALL, make_of_family


class Telling(ToyServer):
    """A make whose server writes its environment into the folder of the model, and ends."""

    capabilities = CAPABILITIES["vllm"]

    def __init__(self, http: JsonServer, load_seconds: float) -> None:
        super().__init__()

    async def ready(self) -> bool:
        return False

    @staticmethod
    def launch(config: EngineConfig, model: str, port: int) -> Launch:
        return Launch(("/bin/sh", "-c", f"env > {model}/environment; exit 3"), {"GIVEN": "yes"})


async def test_a_server_does_not_inherit_its_adapters_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = EngineConfig(kind="tests.servers.test_role:Telling").model_dump_json()
    spec = EngineSpec("engine-0", "", str(tmp_path), "", "", config, 1, 0.0, scratch=str(tmp_path))
    monkeypatch.setenv(ENGINE_KEY, "a secret")
    with pytest.raises(RoleDied, match="the server of engine-0 ended with exit code 3"):
        await play(spec)
    environment = (tmp_path / "environment").read_text()
    assert "GIVEN=yes" in environment
    assert "a secret" not in environment
    assert ENGINE_KEY not in os.environ


#: Binds a port as a stranger would, and tells what came of it.
_STRANGER = """
import socket, sys
with socket.socket() as stranger:
    try:
        stranger.bind(("127.0.0.1", int(sys.argv[1])))
        print("taken")
    except OSError:
        print("refused")
"""


class Besieged(Telling):
    """A make whose port a stranger asks for before its server binds it."""

    @staticmethod
    def launch(config: EngineConfig, model: str, port: int) -> Launch:
        words = (sys.executable, "-c", _STRANGER, str(port), f"{model}/stranger")
        return Launch(("/bin/sh", "-c", '"$0" "$1" "$2" "$3" > "$4"; exit 3', *words), {})


async def test_nobody_takes_the_port_of_a_server_before_it_listens(tmp_path: Path) -> None:
    config = EngineConfig(kind="tests.servers.test_role:Besieged").model_dump_json()
    with pytest.raises(RoleDied, match="ended with exit code 3"):
        await play(EngineSpec("engine-0", "", str(tmp_path), "", "", config, 1, 0.0, scratch=str(tmp_path)))
    assert (tmp_path / "stranger").read_text() == "refused\n"


FILTERS: dict[str, Any] = {"top_p": 0.9, "top_k": 3, "min_p": 0.1}


class Unfiltered(Telling):
    """A make whose log-probabilities do not follow filters, and whose server is ready."""

    capabilities = CAPABILITIES["sglang"]

    async def ready(self) -> bool:
        return True


def test_filters_that_the_log_probabilities_of_a_make_do_not_follow_are_refused(tmp_path: Path) -> None:
    build_policy(SMALL, tmp_path, seed=1)
    make, address = "tests.servers.test_role:Unfiltered", ["127.0.0.1:1"]
    scheduler = stretto.Scheduler([(2, 3)], batch_size=1, group_size=2)
    with stretto.Engine.load(tmp_path, kind=make, addresses=address) as engine:
        for asked, (name, value) in itertools.product(((2, 3), scheduler.admit()), FILTERS.items()):
            with pytest.raises(RefusedRequest, match=f"{name}: {value}, and the log-probabilities of SGLang do not"):
                engine.submit(asked, **{name: value})
        with pytest.raises(RefusedRequest, match=r"top_p: 0\.5"):
            engine.generate("3", top_p=0.5)


@pytest.mark.parametrize(("kind", "longest"), [("vllm", 31), ("sglang", 11)])
async def test_no_sequence_goes_beyond_a_window_that_a_make_does_not_compute(
    tmp_path: Path, kind: str, longest: int
) -> None:
    build_policy(SMALL, tmp_path, seed=1)
    make_of_family(tmp_path, "mistral", {"sliding_window": 12}, SMALL, seed=1)
    engine = await _engine(EngineSpec("", "", str(tmp_path), "", "", "", 1, 0.0), EngineConfig(kind=kind), ToyServer())
    with pytest.raises(RefusedRequest, match=f"prompt_token_ids: 32 tokens; at most {longest}"):
        engine.submit_all([GenerateRequest("0", (2,) * 32, (1,), Sampling(max_tokens=2))])


class Counting(ToyServer):
    """Its worker counts what it reads beside the weights."""

    async def load(self, folder: Path, version: int, *, keep: bool) -> None:
        Advance(str(folder)).add(5)
        assert list(folder.glob("*.advance"))
        await super().load(folder, version, keep=keep)


@pytest.mark.parametrize("refuses", [False, True])
async def test_the_folder_of_a_model_that_is_served_as_it_is_has_no_file_more(tmp_path: Path, refuses: bool) -> None:
    build_policy(SMALL, tmp_path, seed=1)
    before = sorted(tmp_path.iterdir())
    spec = EngineSpec("engine-0", "", str(tmp_path), "", "", "", 1, 0.0)
    server = Counting()
    server.refuses_load = refuses
    if refuses:
        with pytest.raises(RoleFailed, match="no weights in"):
            await _engine(spec, EngineConfig(kind="vllm"), server)
    else:
        assert (await _engine(spec, EngineConfig(kind="vllm"), server)).version == 0
    assert sorted(tmp_path.iterdir()) == before
