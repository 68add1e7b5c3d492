"""Promises: what a server on loopback takes for its own name is an address of loopback or a name that leads nowhere
else, with a port or without; whatever stands around such a name makes it another. On the network any address is taken,
since no site can have it for a name, and of names those of the machine and those that a user gave.
"""

import asyncio
import re
import socket

import httpx
from hypothesis import given
from hypothesis import strategies as st
from starlette.responses import Response

from stretto.processes.http.asgi import LOOPBACK, HostNames, by_own_names

_OWN = re.compile(r"(?i)(localhost|ip6-localhost|127(\.(0|[1-9]\d{0,2})){3}|\[[0:]*:0*1\])(:\d{1,5})?", re.ASCII)
_LOOPBACK_ADDRESSES = st.integers(0, 2**24 - 1).map(lambda n: f"127.{n >> 16}.{n >> 8 & 255}.{n & 255}")
_OWN_NAMES = _LOOPBACK_ADDRESSES | st.sampled_from(["localhost", "LocalHost", "ip6-localhost", "[::1]", "[0:0::0:1]"])
_PORTS = st.just("") | st.integers(0, 65_535).map(lambda port: f":{port}")
_PARTS = st.lists(
    _OWN_NAMES
    | _PORTS
    | st.sampled_from([".", "@", "[", "]", "evil.example", ":", "/", "#", "?", "%", "\\", " ", "10.0.0.1"]),
    max_size=5,
).map("".join)
_NETWORK = HostNames("Trainer.lan", loopback=False)


@given(_OWN_NAMES, _PORTS)
def test_the_names_of_loopback_are_taken_with_any_port(name: str, port: str) -> None:
    assert LOOPBACK.has(name + port)
    assert _NETWORK.has(name + port)


@given(_PARTS | st.text(max_size=30))
def test_nothing_else_is_taken_whatever_stands_around_such_a_name(host: str) -> None:
    assert not LOOPBACK.has(host) or _OWN.fullmatch(host)


@given(st.ip_addresses(), _PORTS)
def test_on_the_network_any_address_is_taken_and_on_loopback_its_own(address: object, port: str) -> None:
    host = (f"[{address}]" if ":" in str(address) else str(address)) + port
    assert _NETWORK.has(host)
    assert LOOPBACK.has(host) == address.is_loopback  # type: ignore[attr-defined]


def test_of_names_on_the_network_the_machine_s_and_the_given_one_are_taken() -> None:
    taken = [_NETWORK.has(name) for name in (socket.gethostname(), "trainer.lan:80", "trainer.lan.example", "lan", "")]
    assert taken == [True, True, False, False, False]


def test_what_stands_behind_is_not_reached_under_another_name() -> None:
    async def ask(host: str) -> httpx.Response:
        transport = httpx.ASGITransport(by_own_names(Response("inner"), HostNames(loopback=True)))
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as asking:
            return await asking.get("/", headers={"host": host})

    assert asyncio.run(ask("localhost:8000")).text == "inner"
    refused = asyncio.run(ask("rebound.example"))
    assert (refused.status_code, refused.json()["error"]["param"]) == (403, "host")
    assert refused.json()["error"]["message"].startswith("host: 'rebound.example' is no name of this server")
