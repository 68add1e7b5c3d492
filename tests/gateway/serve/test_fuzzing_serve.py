"""Promises: whatever the body, OpenAI's paths answer it or refuse it with a 4xx of OpenAI's form, and the token
interface with one of its own; the server lives on.
"""

import json

import msgspec
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stretto.engine.wire import Refusal
from tests.engine.byte_policy import NAME
from tests.gateway.serve.serving import CHAT, COMPLETIONS, Serving

FIELDS = [
    *("model", "prompt", "messages", "n", "max_tokens", "max_completion_tokens", "temperature", "top_p", "top_k"),
    *("min_p", "seed", "stop", "stream", "stream_options", "logprobs", "top_logprobs", "echo", "suffix", "best_of"),
    *("user", "logit_bias", "tools", "response_format", "x"),
]
LEAVES = (
    st.none() | st.booleans() | st.integers() | st.integers(-2, 300) | st.floats() | st.text(max_size=8)
    | st.sampled_from([NAME, "user", "text", "system"])
)  # fmt: skip
VALUES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(["role", "content", "type", "text", "include_usage"]), inner, max_size=3)
    ),
    max_leaves=6,
)
PROMPT = st.fixed_dictionaries({"model": st.just(NAME), "prompt": st.just("ab"), "max_tokens": st.just(2)})
TALK = st.fixed_dictionaries(
    {"model": st.just(NAME), "messages": st.just([{"role": "user", "content": "a"}]), "max_tokens": st.just(2)}
)
BODIES = st.builds(
    lambda base, more: base | more, PROMPT | TALK, st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=3)
)


@settings(max_examples=40, suppress_health_check=[HealthCheck.too_slow])
@given(
    body=BODIES.map(lambda tree: json.dumps(tree).encode()) | st.binary(max_size=40),
    path=st.sampled_from([COMPLETIONS, CHAT]),
)
def test_no_body_makes_the_server_fail(serving: Serving, body: bytes, path: str) -> None:
    response = serving.post(path, body)
    if response.status_code != 200:
        assert 400 <= response.status_code < 500, (body, response.text)
        error = response.json()["error"]
        assert error["message"]
        assert error["type"] == "invalid_request_error"


MESSAGE_LEAVES = (
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.integers(-2, 300) | st.text(max_size=4)
)
MESSAGE_VALUES = st.recursive(MESSAGE_LEAVES | st.floats(1.0), lambda inner: st.lists(inner, max_size=3), max_leaves=4)
SAMPLINGS = st.dictionaries(
    st.sampled_from(["max_tokens", "temperature", "stop_token_ids", "top_p", "top_k", "min_p", "stop", "x"]),
    MESSAGE_VALUES,
    max_size=2,
).map(lambda more: {"max_tokens": 2} | more)
MESSAGES = st.builds(
    lambda sampling, more: {"id": "fuzz", "prompt_token_ids": [5, 6], "seeds": [1], "sampling": sampling} | more,
    SAMPLINGS,
    st.dictionaries(
        st.sampled_from(["id", "prompt_token_ids", "seeds", "sampling", "top_logprobs", "x"]),
        MESSAGE_VALUES,
        max_size=1,
    ),
)


@settings(max_examples=25)
@given(
    body=(MESSAGES | st.lists(MESSAGES, max_size=2)).map(msgspec.msgpack.encode) | st.binary(max_size=40),
    path=st.sampled_from(["/generate", "/generate", "/generate", "/update_weights", "/abort"]),
)
def test_no_message_makes_the_token_interface_fail(serving: Serving, body: bytes, path: str) -> None:
    response = serving.post(path, body)
    assert response.status_code in (200, 400, 409), (body, response.content)
    if response.status_code != 200:
        assert msgspec.msgpack.decode(response.content, type=Refusal).found
