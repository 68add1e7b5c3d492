"""Promises: a gateway on loopback is asked by its own names alone, so that no page of another site can open a session
by a name that it lets point here; and the address that it tells is where it was reached, not what a request says.
"""

import asyncio
from pathlib import Path

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto_gateway.sessions.app import GatewayApp
from stretto_gateway.sessions.sessions import RecordedSessions
from tests.gateway.serving import ScriptedModel, model_of, served_gateway

_LABELS = st.text("abcxyz019-", min_size=1, max_size=8)
_NAMES = st.lists(_LABELS | st.sampled_from(["localhost", "127", "0", "1"]), min_size=2, max_size=6).map(".".join)
_NAMES = _NAMES.filter(lambda name: not name.startswith("127."))
_FOREIGN = st.one_of(_NAMES, _NAMES.map(lambda name: f"localhost@{name}"), _NAMES.map(lambda name: f"{name}:8000"))
_PATHS = st.sampled_from(
    [
        ("POST", "/sessions"),
        ("GET", "/health"),
        ("GET", "/v1/models"),
        ("POST", "/s/k/v1/chat/completions"),
        ("GET", "/x"),
    ]
)


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> GatewayApp:
    model = ScriptedModel(lambda prompt: "yes")
    served = model_of(model.tokenizer)
    host = RecordedSessions(tmp_path_factory.mktemp("sessions"), served, model.sampler)
    return GatewayApp(host.load(), host, served)


@given(_FOREIGN, _PATHS)
def test_no_name_of_another_site_opens_or_sees_anything(app: GatewayApp, name: str, asked: tuple[str, str]) -> None:
    asking = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://x")
    refused = asyncio.run(asking.request(*asked, headers={"host": name}))
    assert (refused.status_code, refused.json()["error"]["param"]) == (403, "host")


async def test_the_address_that_is_told_is_where_the_gateway_was_reached(tmp_path: Path) -> None:
    async with served_gateway(ScriptedModel(lambda prompt: "yes"), tmp_path) as gateway:
        for host in ("localhost", "LOCALHOST:1", "127.0.0.9:80", "[::1]", gateway.address.removeprefix("http://")):
            opened = await gateway.client.post("/sessions", json={}, headers={"host": host})
            assert opened.json()["base_url"] == f"{gateway.address}/s/{opened.json()['api_key']}/v1"


async def test_with_a_key_on_the_network_any_name_may_be_used_and_none_is_told_again(tmp_path: Path) -> None:
    async with served_gateway(ScriptedModel(lambda prompt: "yes"), tmp_path, operator_key="k", names=None) as gateway:
        headers = {"host": "gateway.lan", "authorization": "Bearer k"}
        opened = await gateway.client.post("/sessions", json={}, headers=headers)
        assert opened.json()["base_url"].startswith(f"{gateway.address}/s/")
