"""Promises over real sockets, with replies as vLLM 0.32 and SGLang 0.5.23 have sent them: what is asked is what they
document, tokens come out the same wherever a stream is cut, and every reply that is none has the server's own words. A
server says how full it is, or is told apart (replies made after their pages)."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.core.errors import DeadlineExceeded, EngineLost, RefusedRequest, WireError
from stretto.core.records import Sampling
from stretto.engine.config import EngineConfig
from stretto.engine.wire import EngineSpec
from stretto_servers import http as wire
from stretto_servers.http import JsonServer
from stretto_servers.make import Continuation, Delta, Make, Occupancy, make_of
from stretto_servers.role import wire_to
from stretto_servers.sglang import SglangServer
from stretto_servers.vllm import VllmServer

SAMPLING = Sampling(max_tokens=99, temperature=0.5, top_p=0.9, top_k=4, min_p=0.1, stop_token_ids=(1,), stop=("x",))
WANTED = Continuation(id="a-0-1", token_ids=(5, 6), sampling=SAMPLING, max_tokens=4, seed=3 + (1 << 40))
TOKENS, LOGPROBS = (13, 18, 11, 15), (-3.062838077545166, -1.0619393587112427, -3.546261787414551, -1.8467333316802979)


MARK = "-ours"  # of the adapter, in the names that it gives to versions


def vllm_event(places: range, ended: str | None = None, version: str = f"7{MARK}") -> bytes:
    content = [
        {
            "token_id": TOKENS[at],
            "logprob": LOGPROBS[at],
            "rank": 8,
            "top_logprobs": [
                {"token_id": TOKENS[at], "logprob": LOGPROBS[at], "rank": 8},
                {"token_id": 2, "logprob": -0.5, "rank": 1},
                {"token_id": 3, "logprob": -9999.0, "rank": 2},
            ],
        }
        for at in places
    ]
    choice = {
        "index": 0,
        "finish_reason": ended,
        "stop_reason": None,
        "token_ids": [TOKENS[at] for at in places],
        "routed_experts": None,
        "weight_versions": [{"version": version, "start": 0, "end": places.stop}] if ended else None,
        "logprobs": {"content": content},
    }
    message = {"request_id": "generate-tokens-s1", "usage": None, "output_mode": "tokens", "choices": [choice]}
    return b"data: " + json.dumps(message).encode() + b"\n\n"


def sglang_event(places: Sequence[int], ended: str | None = None, *, count: int | None = None) -> bytes:
    end = max(places) + 1
    meta: dict[str, Any] = {
        "id": "s1",
        "finish_reason": {"type": ended, "length": 4} if ended else None,
        "prompt_tokens": 5,
        "weight_version": "7",
        "output_token_logprobs": [[LOGPROBS[at], TOKENS[at], None] for at in places],
        "completion_tokens": end if count is None else count,
    }
    if ended:
        meta["weight_versions"] = [{"version": f"7{MARK}", "start": 0, "end": end}]
    message = {"text": "0(", "output_ids": [TOKENS[at] for at in places], "meta_info": meta}
    return b"data: " + json.dumps(message).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"
STREAMS = {
    "vllm": [vllm_event(range(2)), b": ping\n\n", vllm_event(range(2, 4), "length"), DONE],
    "sglang": [sglang_event(range(1)), sglang_event(range(1, 2)), sglang_event(range(2, 4), "length"), DONE],
    "sglang, cumulative": [sglang_event(range(1)), sglang_event(range(2)), sglang_event(range(4), "length"), DONE],
    "sglang, aborted": [sglang_event(range(3)), sglang_event(range(4), "abort"), DONE],
    "sglang, aborted with an event on its way": [
        sglang_event(range(1)),
        sglang_event((*range(1, 4), *range(4)), "abort"),
        DONE,
    ],
    "sglang, aborted with an event on its way before the first": [sglang_event((*range(4), *range(4)), "abort"), DONE],
    "sglang, aborted without news": [sglang_event(range(4)), sglang_event(range(4), "abort"), DONE],
}
GENERATE = {"vllm": "/inference/v1/generate", "sglang": "/generate"}
Asked = list[tuple[str, str, Any]]
Replies = Mapping[str, tuple[int, Sequence[bytes]]]


@asynccontextmanager
async def serving(
    replies: Replies, asked: Asked, *, breaks: bool = False, late: Mapping[str, float] = MappingProxyType({})
) -> AsyncIterator[str]:
    """A server of HTTP/1.1 that sends each reply in the given parts; `breaks`: it closes in the middle of a reply;
    `late`: the seconds that it takes for a path."""

    open_ones: dict[asyncio.Task[None] | None, asyncio.StreamWriter] = {}

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        open_ones[asyncio.current_task()] = writer
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode().splitlines()
                length = next(int(line.split(":")[1]) for line in head if line.startswith("content-length"))
                body = await reader.readexactly(length)
                method, path, _ = head[0].split()
                asked.append((method, path, json.loads(body) if body else None))
                await asyncio.sleep(late.get(path, 0.0))
                status, parts = replies.get(path, (404, [b'{"detail":"Not Found"}']))
                writer.write(f"HTTP/1.1 {status} X\r\ntransfer-encoding: chunked\r\n\r\n".encode())
                for part in parts:
                    writer.write(f"{len(part):x}\r\n".encode() + part + b"\r\n")
                    await writer.drain()
                    await asyncio.sleep(0)
                if breaks:
                    break
                writer.write(b"0\r\n\r\n")
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    try:
        host, port = server.sockets[0].getsockname()
        yield f"{host}:{port}"
    finally:
        server.close()
        for writer in open_ones.values():
            writer.close()
        await asyncio.gather(*(task for task in open_ones if task is not None), return_exceptions=True)


def exchange(
    kind: str,
    replies: Replies,
    work: Callable[[Make], Coroutine[Any, Any, Any]],
    *,
    breaks: bool = False,
    token_seconds: float = 5,
) -> tuple[Any, Asked]:
    """What `work` returns, and what the server was asked."""
    asked: Asked = []

    async def scenario() -> Any:
        async with serving(replies, asked, breaks=breaks) as address:
            make = make_of(kind, JsonServer("engine-0", address, seconds=5, token_seconds=token_seconds), 5)
            assert isinstance(make, VllmServer | SglangServer)
            make.mark = MARK
            try:
                return await work(make)
            finally:
                await make.close()

    return asyncio.run(scenario()), asked


async def all_of(make: Make, wanted: Continuation = WANTED) -> list[Delta]:
    return [delta async for delta in make.stream(wanted)]


def told(deltas: Sequence[Delta]) -> tuple[tuple[int, ...], tuple[float, ...]]:
    tokens = tuple(token for delta in deltas for token in delta.token_ids)
    return tokens, tuple(logprob for delta in deltas for logprob in delta.logprobs)


@pytest.mark.parametrize("stream", STREAMS)
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_the_tokens_are_the_same_wherever_the_stream_is_cut(stream: str, data: st.DataObject) -> None:
    body = b"".join(STREAMS[stream])
    cuts = data.draw(st.lists(st.integers(1, len(body) - 1), max_size=6, unique=True).map(sorted))
    parts = [body[start:end] for start, end in zip([0, *cuts], [*cuts, len(body)], strict=True)]
    kind = stream.partition(",")[0]
    deltas, _ = exchange(kind, {GENERATE[kind]: (200, parts)}, all_of)
    assert told(deltas) == (TOKENS, LOGPROBS)
    assert deltas[-1].ended == ("abort" if "aborted" in stream else "length")
    assert deltas[-1].spans == (("7", 0, 4),)


def test_vllm_is_asked_as_it_documents() -> None:
    _, asked = exchange("vllm", {GENERATE["vllm"]: (200, STREAMS["vllm"])}, all_of)
    sampling = {
        "max_tokens": 4,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 4,
        "min_p": 0.1,
        "seed": WANTED.seed,
        "stop_token_ids": [1],
        "ignore_eos": True,
        "logprobs": 0,
        "detokenize": False,
    }
    body = {"token_ids": [5, 6], "request_id": "a-0-1", "stream": True, "sampling_params": sampling}
    assert asked == [("POST", "/inference/v1/generate", body)]


def test_sglang_is_asked_as_it_documents() -> None:
    _, asked = exchange("sglang", {GENERATE["sglang"]: (200, STREAMS["sglang"])}, all_of)
    sampling = {"max_new_tokens": 4, "temperature": 0.5, "sampling_seed": WANTED.seed % (1 << 31)}
    body = {
        "rid": "a-0-1",
        "input_ids": [5, 6],
        "stream": True,
        "return_logprob": True,
        "top_logprobs_num": 0,
        "sampling_params": sampling | {"stop_token_ids": [1], "ignore_eos": False},
    }
    assert asked == [("POST", "/generate", body)]


def test_the_likeliest_tokens_of_vllm_are_those_asked_for_without_what_was_filtered_out() -> None:
    wanted = Continuation(id="a", token_ids=(5,), sampling=SAMPLING, max_tokens=4, seed=1, top_logprobs=3)
    deltas, _ = exchange("vllm", {GENERATE["vllm"]: (200, STREAMS["vllm"])}, lambda make: all_of(make, wanted))
    assert deltas[0].top_logprobs == (((2, -0.5), (13, LOGPROBS[0])), ((2, -0.5), (18, LOGPROBS[1])))


OK = (200, [b'{"success": true}'])


async def updated(make: Make, keep: bool) -> None:
    await make.pause(keep=keep)
    await make.load(Path("/folder"), 7, keep=keep)
    await make.resume()


@pytest.mark.parametrize("keep", [False, True])
def test_an_update_of_vllm_is_pause_load_version_resume(keep: bool) -> None:
    mode = "keep&clear_cache=false" if keep else "abort&clear_cache=true"
    paths = [f"/pause?mode={mode}", "/collective_rpc", "/update_weight_version", "/resume"]
    _, asked = exchange("vllm", dict.fromkeys(paths, OK), lambda make: updated(make, keep))
    assert asked == [
        ("POST", paths[0], None),
        ("POST", paths[1], {"method": "stretto_load", "args": ["/folder"]}),
        ("POST", paths[2], {"new_version": f"7{MARK}"}),
        ("POST", paths[3], None),
    ]


@pytest.mark.parametrize("keep", [False, True])
def test_an_update_of_sglang_is_pause_load_continue(keep: bool) -> None:
    paths = ["/pause_generation", "/abort_request", "/update_weights_from_disk", "/continue_generation"]
    _, asked = exchange("sglang", dict.fromkeys(paths, OK), lambda make: updated(make, keep))
    assert asked == [
        ("POST", paths[0], {"mode": "in_place" if keep else "retract"}),
        *([] if keep else [("POST", paths[1], {"rid": "", "abort_all": True})]),
        ("POST", paths[2], {"model_path": "/folder", "weight_version": f"7{MARK}", "flush_cache": not keep}),
        ("POST", paths[3], {}),
    ]


def test_a_load_that_sglang_reports_as_failed_is_an_error() -> None:
    said = b'{"success":false,"message":"Cannot find any model weights with `/folder`.","num_paused_requests":0}'
    for status, error in ((200, "has not loaded version 7"), (400, "Cannot find any model weights")):
        replies = {"/update_weights_from_disk": (status, [said])}
        with pytest.raises(WireError, match=error):
            exchange("sglang", replies, lambda make: make.load(Path("/folder"), 7, keep=False))


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_a_load_that_goes_on_is_waited_for_and_ordered_once(kind: str, tmp_path: Path) -> None:
    """What a worker has read stands in a file beside the weights."""
    seconds = 0.3

    async def load(make: Make, grows: bool) -> None:
        async def worker() -> None:
            for piece in range(1000):
                (tmp_path / "1.advance").write_text(str(piece * grows))
                await asyncio.sleep(0.05)

        working = asyncio.create_task(worker())
        try:
            await make.load(tmp_path, 7, keep=False)
        finally:
            working.cancel()

    async def scenario(grows: bool) -> Asked:
        asked: Asked = []
        order = "/collective_rpc" if kind == "vllm" else "/update_weights_from_disk"
        late = {order: 3 * seconds}
        async with serving({order: OK, "/update_weight_version": OK}, asked, late=late) as address:
            make = make_of(kind, JsonServer("engine-0", address, seconds=5, token_seconds=5), seconds)
            try:
                await load(make, grows)
            finally:
                await make.close()
        return asked

    assert len(asyncio.run(scenario(grows=True))) == (2 if kind == "vllm" else 1)
    with pytest.raises(DeadlineExceeded, match=r"the adapter of engine-0 waited 0\.3 s for /.* of engine-0"):
        asyncio.run(scenario(grows=False))


NO = {
    400: b'{"error":{"message":"The decoder prompt (length 513) is too long","code":400}}',
    404: b'{"detail":"Not Found"}',
    500: b'{"error":{"message":"EngineCore encountered an issue","code":500}}',
}


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
@pytest.mark.parametrize(("status", "said"), [(400, "too long"), (404, "Not Found"), (500, "EngineCore")])
def test_a_server_that_says_no_is_quoted(kind: str, status: int, said: str) -> None:
    with pytest.raises(RefusedRequest if status == 400 else WireError, match=said) as caught:
        exchange(kind, {GENERATE[kind]: (status, [NO[status]])}, all_of)
    assert isinstance(caught.value, RefusedRequest) == (status == 400)
    assert "engine-0" in str(caught.value)
    assert str(status) in str(caught.value)


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
@pytest.mark.parametrize(
    ("event", "error", "message"),
    [
        (b'data: {"error":{"message":"Duplicate request ID","code":400}}\n\n', RefusedRequest, "Duplicate request ID"),
        (b'data: {"error":{"message":"EngineCore died","code":500}}\n\n', WireError, "EngineCore died"),
        (b"data: {half\n\n", WireError, "sends an event that .* does not document"),
        (b'data: {"choices": 3, "meta_info": 3}\n\n', WireError, "does not document"),
        (b'data: {"choices":[{"token_ids":["x"]}],"meta_info":{"completion_tokens":"x"}}\n\n', WireError, "document"),
    ],
)
def test_an_error_in_a_stream_is_an_error(kind: str, event: bytes, error: type[WireError], message: str) -> None:
    with pytest.raises(error, match=message):
        exchange(kind, {GENERATE[kind]: (200, [STREAMS[kind][0], event])}, all_of)


def test_sglang_with_too_few_log_probabilities_is_an_error() -> None:
    with pytest.raises(WireError, match="a completion with 4 tokens and 3 log-probabilities"):
        exchange("sglang", {"/generate": (200, [sglang_event(range(3), count=4)])}, all_of)


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_a_connection_that_closes_in_mid_stream_loses_the_engine(kind: str) -> None:
    whole = STREAMS[kind][0]
    for parts in ([whole], [whole, STREAMS[kind][2][:40]], []):
        with pytest.raises(EngineLost, match="broke off in the middle of a reply"):
            exchange(kind, {GENERATE[kind]: (200, parts)}, all_of, breaks=True)


def test_an_event_without_an_end_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "_LARGEST_EVENT", 1000)
    with pytest.raises(WireError, match="without an end"):
        exchange("vllm", {GENERATE["vllm"]: (200, [b"x" * 600, b"x" * 600])}, all_of)


DESCRIBED = {
    "vllm": {
        "/version": b'{"version":"0.32.0"}',
        "/v1/models": b'{"object":"list","data":[{"id":"A","root":"/models/A","max_model_len":512}]}',
        "/is_paused": b'{"is_paused":false}',
        "/weight_info": b'{"weight_version":"default"}',
    },
    "sglang": {
        "/server_info": b'{"model_path":"/models/A","version":"0.5.23","dtype":"float32"}',
        "/model_info": b'{"model_path":"/models/A","weight_version":"default"}',
        "/v1/models": b'{"object":"list","data":[{"id":"/models/A","max_model_len":512}]}',
    },
}


@pytest.mark.parametrize(
    ("kind", "release", "context"), [("vllm", "vLLM 0.32.0", 512), ("sglang", "SGLang 0.5.23", 510)]
)
def test_a_server_is_described_by_release_model_and_context(kind: str, release: str, context: int) -> None:
    replies = {path: (200, [body]) for path, body in DESCRIBED[kind].items()}
    served, _ = exchange(kind, replies, lambda make: make.describe())
    assert (served.release, served.model, served.context_length) == (release, "/models/A", context)


@pytest.mark.parametrize(("kind", "path"), [(kind, path) for kind, paths in DESCRIBED.items() for path in paths])
def test_a_server_without_an_endpoint_is_named_with_it_and_with_the_release_that_has_it(kind: str, path: str) -> None:
    replies = {known: (200, [body]) for known, body in DESCRIBED[kind].items() if known != path}
    with pytest.raises(WireError, match=f"answers {path} with status 404") as caught:
        exchange(kind, replies, lambda make: make.describe())
    assert {"vllm": "vLLM 0.32 or newer", "sglang": "SGLang 0.5.20 or newer"}[kind] in str(caught.value)


@pytest.mark.parametrize("kind", DESCRIBED)
def test_a_server_that_describes_no_model_is_none_to_train_with(kind: str) -> None:
    bodies = DESCRIBED[kind] | {"/v1/models": b'{"data":["A"]}'}
    replies = {path: (200, [body]) for path, body in bodies.items()}
    with pytest.raises(WireError, match="engine-0 is no server that stretto can train with"):
        exchange(kind, replies, lambda make: make.describe())


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
async def test_a_server_that_accepts_and_never_replies_has_the_deadlines_that_the_engine_was_started_with(
    kind: Literal["vllm", "sglang"],
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        http = JsonServer("engine-0", address, seconds=0.05, token_seconds=0.05)
        spec = EngineSpec("engine-0", "", "", "", "", "", 1, 0.0, token_seconds=0.05, load_seconds=0.06)
        started = wire_to(address, spec, EngineConfig(kind=kind))
        for make in (given := make_of(kind, http, 0.05), started):
            with pytest.raises(DeadlineExceeded, match=r"waited 0\.05 s for the next tokens of engine-0"):
                await all_of(make)
        assert not await given.ready()
        with pytest.raises(DeadlineExceeded, match=r"of engine-0"):
            await given.resume()
        with pytest.raises(DeadlineExceeded, match=r"waited 0\.06 s for .* of engine-0"):
            await started.load(Path("/nowhere"), 1, keep=False)


METRICS = """# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 6.0
vllm:num_requests_running{engine="1",model_name="m"} 2.0
vllm:num_requests_waiting{engine="0",model_name="m"} 4.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="m",reason="capacity"} 4.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.75
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.25
vllm:num_preemptions_total{engine="0",model_name="m"} 3.0
"""
NAN = METRICS.replace("4.0", "NaN").encode()
LOADS = {"loads": [{"num_running_reqs": 8, "num_waiting_reqs": 4, "token_usage": 0.75}]}
FULL: dict[str, tuple[str, bytes]] = {
    "vllm": ("/metrics", METRICS.encode()),
    "sglang": ("/v1/loads?include=core", json.dumps(LOADS).encode()),
}


@pytest.mark.parametrize("kind", FULL)
def test_a_server_says_how_full_it_is(kind: str) -> None:
    """Eight requests run in three quarters of the cache and four wait: all need 12 / 8 of it."""
    path, page = FULL[kind]
    found, asked = exchange(kind, {path: (200, [page])}, lambda make: make.occupancy())
    assert found == Occupancy(running=8, waiting=4, cache=0.75, preempted=3 if kind == "vllm" else 0)
    assert found.needed == pytest.approx(0.75 * 12 / 8)
    assert [(method, path) for method, path, _ in asked] == [("GET", path)]


@pytest.mark.parametrize("kind", FULL)
@pytest.mark.parametrize("page", [b"{}", b'{"loads": []}', b"# nothing of the kind", NAN])
def test_a_server_that_does_not_say_how_full_it_is_is_told_apart(kind: str, page: bytes) -> None:
    with pytest.raises(WireError, match="does not say how full"):
        exchange(kind, {FULL[kind][0]: (200, [page])}, lambda make: make.occupancy())
