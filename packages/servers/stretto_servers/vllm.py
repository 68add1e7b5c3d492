"""Client of vLLM's server: token ids in and out by ``/inference/v1/generate``, weights from a folder.

    stream   POST /inference/v1/generate           server-sent events; weight versions with the last one
    pause    POST /pause?mode=abort|keep           then no request gets a token
    load     POST /collective_rpc stretto_load     every worker reads the folder (`worker/vllm_extension.py`)
             POST /update_weight_version           which later tokens are marked with
    resume   POST /resume
    held     POST /collective_rpc stretto_held     checksums of every worker's memory
    full?    GET  /metrics                         Prometheus' text format

Needs ``--enable-scale-out``, the worker extension and ``VLLM_SERVER_DEV_MODE=1``; the oldest release is in
`engine.config`.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from math import floor
from pathlib import Path
from typing import Any

import msgspec

from stretto.core.errors import UNREADABLE, WireError
from stretto.core.records import Likeliest
from stretto.engine.config import CAPABILITIES, EngineConfig
from stretto_servers.http import LOOK_SECONDS, JsonServer, refused
from stretto_servers.make import (
    NO_PROBABILITY,
    Continuation,
    Delta,
    Launch,
    Occupancy,
    Room,
    Served,
    new_mark,
    with_own_versions,
)
from stretto_servers.worker.advance import FOLDER, read_of

NEEDED = f"{CAPABILITIES['vllm'].needed}, started with --enable-scale-out and VLLM_SERVER_DEV_MODE=1"
_GENERATE = "/inference/v1/generate"
_MOST = 0.9  # largest fraction of a GPU's memory: vLLM's default


class _Top(msgspec.Struct):
    token_id: int
    logprob: float


class _Token(_Top):
    top_logprobs: list[_Top] = []


class _Logprobs(msgspec.Struct):
    content: list[_Token] | None = None


class _Span(msgspec.Struct):
    version: str
    start: int
    end: int


class _Choice(msgspec.Struct):
    token_ids: list[int]
    finish_reason: str | None = None
    logprobs: _Logprobs | None = None
    weight_versions: list[_Span] | None = None


class _Error(msgspec.Struct):
    code: int = 500


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    error: _Error | None = None


_EVENT = msgspec.json.Decoder(_Event)


class VllmServer:
    """Client of one vLLM server (satisfies `stretto_servers.make.Make`)."""

    capabilities = CAPABILITIES["vllm"]

    def __init__(self, http: JsonServer, load_seconds: float) -> None:
        self._http, self._load_seconds = http, load_seconds
        self._folder: Path | None = None
        self.mark = ""  # until the first load: tokens of weights that the server began with

    async def stream(self, continuation: Continuation) -> AsyncGenerator[Delta]:
        async with aclosing(self._http.events(_GENERATE, _body(continuation))) as events:
            async for event in events:
                yield with_own_versions(_delta(self._http.name, event, continuation.top_logprobs), self.mark)

    async def ready(self) -> bool:
        return await self._http.status("/health") == 200

    async def describe(self) -> Served:
        try:
            release = (await self._http.exchange("GET", "/version"))["version"]
            (model, *_) = (await self._http.exchange("GET", "/v1/models"))["data"]
            await self._http.exchange("GET", "/is_paused")
            await self._http.exchange("GET", "/weight_info")
            return Served(f"vLLM {release}", model.get("root") or model["id"], model.get("max_model_len"))
        except (WireError, AttributeError, KeyError, TypeError, ValueError) as error:
            raise WireError(f"{self._http.name} is no server that stretto can train with ({error}); {NEEDED}") from None

    async def occupancy(self) -> Occupancy:
        page = str(await self._http.exchange("GET", "/metrics", seconds=LOOK_SECONDS))
        try:
            running, waiting, preempted = (
                int(sum(_values(page, name)))
                for name in ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:num_preemptions_total")
            )
            return Occupancy(running, waiting, max(_values(page, "vllm:kv_cache_usage_perc")), preempted)
        except (ValueError, OverflowError) as error:  # no value, or none that is a finite number
            found = f"(vllm:kv_cache_usage_perc and the like: {error})"
            raise WireError(f"{self._http.name} does not say how full its KV cache is {found}") from None

    async def score(self, token_ids: Sequence[int]) -> tuple[float, ...]:
        order = {"token_ids": list(token_ids), "sampling_params": {"max_tokens": 1, "prompt_logprobs": 0}}
        reply = await self._http.exchange("POST", _GENERATE, order)
        try:
            (_, *scored) = reply["prompt_logprobs"]
            return tuple(found[str(token)]["logprob"] for token, found in zip(token_ids[1:], scored, strict=True))
        except (KeyError, TypeError, ValueError) as error:
            raise WireError(f"{self._http.name} does not score a text as vLLM documents it ({error!r})") from None

    async def pause(self, *, keep: bool) -> None:
        mode = "keep&clear_cache=false" if keep else "abort&clear_cache=true"
        await self._http.exchange("POST", f"/pause?mode={mode}")

    async def load(self, folder: Path, version: int, *, keep: bool) -> None:
        self.mark = self.mark or new_mark()
        await self._workers("stretto_load", folder)
        await self._http.exchange("POST", "/update_weight_version", {"new_version": f"{version}{self.mark}"})

    async def resume(self) -> None:
        await self._http.exchange("POST", "/resume")

    async def held(self, folder: Path, shapes: Mapping[str, Sequence[int]]) -> Sequence[Mapping[str, str]]:
        reply = await self._workers("stretto_held", folder, msgspec.json.encode(shapes).decode())
        try:
            return msgspec.convert(reply["results"], list[dict[str, str]])
        except (KeyError, TypeError, msgspec.ValidationError) as error:
            raise WireError(f"{self._http.name} does not say what its workers hold ({error!r})") from None

    async def _workers(self, method: str, folder: Path, *more: str) -> Any:
        """Call a method of the worker extension in all workers; returns vLLM's reply with their results. vLLM's own
        time limit is not used, because it would end the wait but not the work."""
        self._folder = folder
        order = {"method": method, "args": [str(folder), *more]}
        return await self._http.exchange("POST", "/collective_rpc", order, self._load_seconds, lambda: self.read)

    @property
    def read(self) -> int:
        return read_of(self._folder) if self._folder is not None else 0

    async def close(self) -> None:
        await self._http.close()

    @staticmethod
    def launch(config: EngineConfig, model: str, port: int) -> Launch:
        """Command and environment that start a server of the folder `model` on the loopback interface.
        `engine.arguments` come last, so that they override others."""
        options = {
            "--model": model,
            "--host": "127.0.0.1",
            "--port": str(port),
            "--dtype": config.dtype,
            "--max-num-seqs": str(config.slots),
            "--kv-cache-memory-bytes": str(config.cache_bytes // config.gpus),  # of each GPU
            "--logprobs-mode": "processed_logprobs",
            "--worker-extension-cls": "vllm_extension.Loader",
            "--stream-interval": "8",  # tokens per event; an event costs the server as much as several tokens
        }
        words = [word for option in options.items() for word in option]
        flags: tuple[str, ...] = ("--enable-scale-out", "--disable-uvicorn-access-log")
        module = ("-m", "vllm.entrypoints.openai.api_server")
        environment = {
            "VLLM_SERVER_DEV_MODE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": str(config.threads),
            "PYTHONPATH": FOLDER,
        }
        if config.on_cpu:  # compilation takes minutes, and several engines would bind threads to the same cores
            # Chunked prefill ends a server on a CPU: it rewinds the request's random generator, which has no offset
            # there (RuntimeError: CPU Generator does not use offset).
            flags += ("--enforce-eager", "--no-enable-chunked-prefill")
            environment |= {"TORCH_COMPILE_DISABLE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        return Launch((str(config.python), *module, *words, *flags, *config.arguments), environment)

    @staticmethod
    def flags_of_room(config: EngineConfig, model: str, room: Room) -> dict[str, str]:
        """Flag with the fraction of the GPU's memory that must be free at the start. The size of the KV cache is given
        in bytes by another flag."""
        return {"--gpu-memory-utilization": f"{floor(min(room.share, _MOST) * 1000) / 1000:.3f}"}


def _values(page: str, name: str) -> list[float]:
    lines = (line for line in page.splitlines() if line.startswith((f"{name}{{", f"{name} ")))
    return [float(line.rpartition(" ")[2]) for line in lines]


def _body(wanted: Continuation) -> dict[str, object]:
    sampling = wanted.sampling
    return {
        "token_ids": list(wanted.token_ids),
        "request_id": wanted.id,
        "stream": True,
        "sampling_params": {
            "max_tokens": wanted.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "min_p": sampling.min_p,
            "seed": wanted.seed,
            "stop_token_ids": list(sampling.stop_token_ids),
            "ignore_eos": True,  # only the recipe's stop tokens end a completion, not those of the model's config
            "logprobs": wanted.top_logprobs,
            "detokenize": False,
        },
    }


def _delta(server: str, event: bytes, top: int) -> Delta:
    try:
        message = _EVENT.decode(event)
    except UNREADABLE as error:
        raise WireError(f"{server} sends an event that vLLM does not document ({error}): {event[:80]!r}") from None
    if message.error is not None:
        raise refused(server, _GENERATE, message.error.code, event)
    if not message.choices:
        return Delta()
    choice = message.choices[0]
    tokens = (choice.logprobs and choice.logprobs.content) or []
    if others := [pair for pair in zip(choice.token_ids, tokens, strict=False) if pair[0] != pair[1].token_id]:
        (token, told), *_ = others
        raise WireError(f"{server} sends the log-probability of token {told.token_id} for token {token}")
    return Delta(
        token_ids=tuple(choice.token_ids),
        logprobs=tuple(token.logprob for token in tokens),
        top_logprobs=tuple(_likeliest(token.top_logprobs, top) for token in tokens) if top else (),
        ended=choice.finish_reason or "",
        spans=tuple((span.version, span.start, span.end) for span in choice.weight_versions or ()),
    )


def _likeliest(found: list[_Top], count: int) -> Likeliest:
    """The `count` likeliest tokens, likeliest first. vLLM's list also has the sampled token, in the first position.
    Tokens without probability are left out."""
    pairs = {token.token_id: token.logprob for token in found if token.logprob > NO_PROBABILITY}
    return tuple(sorted(pairs.items(), key=lambda pair: -pair[1])[:count])
