"""A server of `stretto tinker` in this process, and a client that speaks as the SDK does, field by field."""

import asyncio
import atexit
import threading
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from stretto.engine.config import EngineConfig
from stretto.engine.http.lifecycle import GracefulServer, run_app
from stretto.processes.http.reach import bind
from stretto_tinker.compute.base import LocalBackend
from stretto_tinker.serve import TinkerServer
from stretto_tinker.wire import schema

NAME = "base"
_PROTO = {"content-type": "application/x-protobuf"}
_HTTP = httpx.Client(timeout=60)
atexit.register(_HTTP.close)


def backend_of(model: Path) -> LocalBackend:
    return LocalBackend(model, NAME, EngineConfig(cache_gib=0.25, device="cpu"), 512)


@contextmanager
def serving(backend: LocalBackend, folder: Path, keys: Sequence[str] = ()) -> Iterator[tuple[str, TinkerServer]]:
    """The address of a server, and the server."""
    bound = bind("127.0.0.1", 0, ("host", "port"))
    server = TinkerServer(backend, folder, frozenset(keys))
    http = GracefulServer(server.app, server, patience=1.0, signals=False)
    thread = threading.Thread(target=lambda: asyncio.run(run_app(http, [bound], server.run)))
    bound.listen()
    thread.start()
    try:
        yield f"http://127.0.0.1:{bound.getsockname()[1]}", server
    finally:
        http.should_exit = True
        thread.join(30)
        server.close()


@contextmanager
def held(server: TinkerServer) -> Iterator[None]:
    """The worker waits between two turns meanwhile, so that requests meet in one turn."""
    gate, reached = threading.Event(), threading.Event()

    def wait() -> None:
        reached.set()
        gate.wait(30)

    server.worker._order(wait)
    assert reached.wait(60), "the worker ends its turn"
    try:
        yield
    finally:
        gate.set()


def tensor(message: Any, values: Any) -> None:
    """Write numbers into a message `Tensor`."""
    array = np.asarray(values)
    array = array.astype(np.int64) if array.dtype.kind in "iu" else array.astype(np.float32)
    message.dense, message.dtype = array.tobytes(), 2 if array.dtype == np.int64 else 1
    message.shape.extend(array.shape)


Data = Sequence[tuple[Sequence[int], dict[str, Any]]]


def job(
    model: str, seq: int, data: Data, loss: str = "cross_entropy", *, forward_only: bool = False, **config: float
) -> bytes:
    """The body of a forward, or of a forward and backward, request."""
    message = schema.new("ForwardBackwardRequest")
    message.model_id, message.seq_id, message.loss_fn, message.forward_only = model, seq, loss, forward_only
    for name, number in config.items():
        message.loss_fn_config_v2.add(key=name).value.number = number
    for tokens, inputs in data:
        datum = message.data.add()
        datum.model_input.add().encoded_text.tokens = np.asarray(tokens, np.int32).tobytes()
        for name, values in inputs.items():
            tensor(datum.loss_fn_inputs.add(key=name).value, values)
    return bytes(message.SerializeToString())


@dataclass
class Output:
    """The result of a forward."""

    logprobs: list[np.ndarray[Any, Any]]
    metrics: dict[str, float]

    @property
    def loss(self) -> float:
        return self.metrics["loss:sum"]


def output_of(raw: bytes) -> Output:
    message = schema.parse("ForwardBackwardOutput", raw)
    rows: list[np.ndarray[Any, Any]] = []
    for record in message.loss_fn_outputs:
        [named] = record.fields
        numbers = np.frombuffer(named.value.data, np.float32)
        ends = np.frombuffer(named.value.offsets, np.int64) // 4
        shape = tuple(named.value.trailing_shape)
        rows += [numbers[a:b].reshape(-1, *shape) for a, b in pairwise(ends)]
    return Output(rows, {one.key: one.value for one in message.metrics})


@dataclass
class Client:
    """A client with a key."""

    address: str
    key: str = "tml-test"
    session: str = ""
    http: httpx.Client = _HTTP

    def post(self, path: str, body: Any = None, *, headers: dict[str, str] | None = None) -> httpx.Response:
        url, given = f"{self.address}/api/v1/{path}", {"x-api-key": self.key, **(headers or {})}
        if isinstance(body, bytes):
            return self.http.post(url, content=body, headers={**_PROTO, **given})
        return self.http.post(url, json=body or {}, headers=given)

    def get(self, path: str) -> httpx.Response:
        return self.http.get(f"{self.address}/api/v1/{path}", headers={"x-api-key": self.key})

    def delete(self, path: str) -> httpx.Response:
        return self.http.delete(f"{self.address}/api/v1/{path}", headers={"x-api-key": self.key})

    def opened(self) -> str:
        """The session, opened when it is first asked for."""
        if not self.session:
            body = {"tags": [], "user_metadata": {}, "sdk_version": "test", "type": "create_session"}
            reply = self.post("create_session", body, headers={"x-idempotency-key": uuid.uuid4().hex})
            self.session = told(reply)["session_id"]
        return self.session

    def create(self, number: int = 0, *, rank: int = 4, seed: int | None = 7, **lora: bool) -> str:
        """The id of a new model."""
        config = {"rank": rank, "seed": seed, **lora}
        body = {"session_id": self.opened(), "model_seq_id": number, "base_model": NAME, "lora_config": config}
        return str(self.result(told(self.post("create_model", body))["request_id"])["model_id"])

    def forward_backward(self, model: str, seq: int, data: Data, loss: str = "cross_entropy", **more: Any) -> str:
        """The id of the request."""
        return str(told(self.post("forward_backward", job(model, seq, data, loss, **more)))["request_id"])

    def step(self, model: str, seq: int, **adam: float) -> str:
        body = {"model_id": model, "seq_id": seq, "adam_params": {"learning_rate": 1e-2, **adam}}
        return str(told(self.post("optim_step", body))["request_id"])

    def save(self, model: str, seq: int, name: str | None, what: str = "save_weights", **more: Any) -> Any:
        body = {"model_id": model, "seq_id": seq, **({} if name is None else {"path": name}), **more}
        return self.result(told(self.post(what, body))["request_id"])

    def sampler(self, number: int, path: str | None = None) -> str:
        body = {"session_id": self.opened(), "sampling_session_seq_id": number}
        body |= {"base_model": NAME} if path is None else {"model_path": path}
        return str(told(self.post("create_sampling_session", body))["sampling_session_id"])

    def sample(self, sampler: str, seq: int, prompt: Sequence[int], *, n: int = 1, **more: Any) -> str:
        """The id of the request; further fields as keywords, those of ``sampling_params`` as ``params``."""
        params = {"max_tokens": 8, **more.pop("params", {})}
        chunks = [{"type": "encoded_text", "tokens": list(prompt)}]
        body = {"sampling_session_id": sampler, "seq_id": seq, "num_samples": n, "prompt": {"chunks": chunks}}
        return str(told(self.post("asample", {**body, "sampling_params": params, **more}))["request_id"])

    def fetch(self, request: str, *, proto: bool = True) -> httpx.Response:
        """The reply to a request for a result, once there is one."""
        accept = {"accept": "application/x-protobuf" if proto else "application/json"}
        while (reply := self.post("retrieve_future", {"request_id": request}, headers=accept)).status_code == 408:
            pass
        return reply

    def result(self, request: str) -> Any:
        """A result in JSON."""
        return told(self.fetch(request))

    def output(self, request: str) -> Output:
        """The result of a forward."""
        reply = self.fetch(request)
        assert "protobuf" in reply.headers["content-type"], reply.text
        return output_of(reply.content)

    def sampled(self, request: str) -> Any:
        """The message of samples."""
        reply = self.fetch(request)
        assert "protobuf" in reply.headers["content-type"], reply.text
        return schema.parse("SampleResponse", reply.content)


@contextmanager
def a_client(backend: LocalBackend, folder: Path) -> Iterator[tuple[Client, TinkerServer]]:
    """A client of a server of its own, and the server."""
    with serving(backend, folder) as (address, server):
        yield Client(address), server


def told(reply: httpx.Response) -> Any:
    """The body of a reply that is no error."""
    assert reply.status_code == 200, f"{reply.status_code} {reply.text}"
    return reply.json()


def tokens_of(sequence: Any) -> list[int]:
    return np.frombuffer(sequence.tokens, np.int32).tolist()  # type: ignore[no-any-return]
