"""Promises over real sockets: a server that has no room now (429, 503), or that a proxy does not reach (502, 504), is
asked again or loses the completion to another engine; it counts as no liar, so that neither it nor its tokens are
dropped. Comments that keep a connection alive are no tokens, and a log-probability is that of its token.

Two requests to a server have two seeds, as far as servers take seeds: vLLM 63 bits, SGLang 31."""

import asyncio
import itertools
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.core.errors import DeadlineExceeded, EngineLied, EngineLost, WireError
from stretto.core.records import GenerateRequest, Sampling
from stretto.engine.backend import Stream
from stretto_servers.completions import OpenCompletion
from stretto_servers.make import Delta, Make
from tests.servers.test_wires import GENERATE, LOGPROBS, STREAMS, TOKENS, all_of, exchange, told


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
@pytest.mark.parametrize("status", [429, 503])
def test_a_server_without_room_is_asked_again_until_it_has_some(kind: str, status: int) -> None:
    replies = {GENERATE[kind]: (status, [b"busy"])}

    async def work(make: Make) -> list[Delta]:
        asyncio.get_running_loop().call_later(0.25, replies.update, {GENERATE[kind]: (200, STREAMS[kind])})
        return await all_of(make)

    deltas, asked = exchange(kind, replies, work)
    assert told(deltas) == (TOKENS, LOGPROBS)
    assert len(asked) > 1
    assert all(one == asked[0] for one in asked)


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
@pytest.mark.parametrize("status", [429, 502, 503, 504])
def test_a_server_that_gets_no_room_loses_the_completion_and_has_told_no_lie(kind: str, status: int) -> None:
    """The tokens that it has sent before are kept, and another engine goes on; 502 and 504 are a proxy's."""
    with pytest.raises(EngineLost, match=f"engine-0 answers {GENERATE[kind]} with status {status}: busy") as caught:
        exchange(kind, {GENERATE[kind]: (status, [b"busy"])}, all_of, token_seconds=0.3)
    assert not isinstance(caught.value, EngineLied)
    event = b'data: {"error":{"message":"busy","code":%d}}\n\n' % status
    with pytest.raises(EngineLost, match=f"with status {status}: busy"):
        exchange(kind, {GENERATE[kind]: (200, [STREAMS[kind][0], event])}, all_of)


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_comments_are_no_tokens_that_a_deadline_waits_for(kind: str) -> None:
    """A server, or a proxy, keeps the connection alive for a request that it never serves."""

    class Endless(list[bytes]):
        def __iter__(self) -> Iterator[bytes]:
            return itertools.chain(STREAMS[kind][:1], itertools.repeat(b": ping\n\n"))

    async def work(make: Make) -> list[Delta]:
        return await asyncio.wait_for(all_of(make), 5)

    with pytest.raises(DeadlineExceeded, match=r"waited 0\.3 s for the next tokens of engine-0"):
        exchange(kind, {GENERATE[kind]: (200, Endless())}, work, token_seconds=0.3)


def test_a_log_probability_of_another_token_is_an_error() -> None:
    event = STREAMS["vllm"][0].replace(b'"token_ids": [13, 18]', b'"token_ids": [13, 19]')
    with pytest.raises(WireError, match="engine-0 sends the log-probability of token 18 for token 19"):
        exchange("vllm", {GENERATE["vllm"]: (200, [event])}, all_of)


SEEDS = st.integers(0, 2**64 - 1)
#: What callers give: small ones, and those beside each other.
GIVEN = SEEDS | st.integers(0, 5) | SEEDS.map(lambda seed: seed ^ 1) | st.integers(2**63, 2**63 + 5)


def asked(seed: int) -> int:
    request = GenerateRequest("a", (1,), (seed,), Sampling(max_tokens=4))
    return OpenCompletion(request, 0, Stream(1), limit=4, watch=None).continuation(0, version=0).seed


@given(GIVEN, GIVEN)
def test_two_seeds_stay_two(one: int, other: int) -> None:
    assert 0 <= asked(one) < 2**63
    assert (asked(one) == asked(other)) == (one == other)
    assert asked(one) == one or one >= 2**63


@given(SEEDS)
def test_seeds_beside_each_other_stay_two(seed: int) -> None:
    beside = asked(seed ^ 1)
    assert asked(seed) != beside
    if seed < 2**63 - 1:
        assert asked(seed) % 2**31 != beside % 2**31  # what SGLang gets
