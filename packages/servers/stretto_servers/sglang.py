"""Client of SGLang's server: token ids in and out by ``/generate``, weights from a folder.

    stream   POST /generate                     server-sent events; weight versions with the last one
    pause    POST /pause_generation             in_place, or retract and then /abort_request for all
    load     POST /update_weights_from_disk     with the version, which later tokens are marked with
    resume   POST /continue_generation
    held     POST /weights_checker              needs our plugin (`worker/sglang_extension.py`)
    full?    GET  /v1/loads

SGLang reports log-probabilities after temperature but before filters. Therefore recipes with top_p, top_k or min_p are
refused (`engine.config`, which also has the oldest release). On a CPU it ignores seeds.
"""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from math import ceil
from pathlib import Path

import msgspec

from stretto.core.errors import UNREADABLE, WireError
from stretto.engine.config import CAPABILITIES, EngineConfig
from stretto.model.hf.inspection import inspect_model_folder
from stretto_servers.http import LOOK_SECONDS, JsonServer, refused
from stretto_servers.make import (
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

NEEDED = CAPABILITIES["sglang"].needed
_GENERATE = "/generate"
_MOST = 0.95  # largest fraction of the free GPU memory for weights and cache
_LAST_PLACES = 2  # last positions of the context, which SGLang does not use
#: In the reply of a server that has no such path, or no such action because it was started without our plugin.
_WITHOUT_PLUGIN = re.compile(r"with status 40[45]\b|Unsupported action")

_Token = tuple[float, int, str | None]  # log-probability, id, text


class _Span(msgspec.Struct):
    version: str
    start: int
    end: int


class _Reason(msgspec.Struct):
    type: str


class _Meta(msgspec.Struct):
    completion_tokens: int = 0
    finish_reason: _Reason | None = None
    output_token_logprobs: list[_Token] = []
    output_top_logprobs: list[list[_Token] | None] = []
    weight_versions: list[_Span] | None = None


class _Error(msgspec.Struct):
    code: int = 500


class _Event(msgspec.Struct):
    meta_info: _Meta | None = None
    error: _Error | None = None


_EVENT = msgspec.json.Decoder(_Event)


class SglangServer:
    """Client of one SGLang server (satisfies `stretto_servers.make.Make`)."""

    capabilities = CAPABILITIES["sglang"]

    def __init__(self, http: JsonServer, load_seconds: float) -> None:
        self._http, self._load_seconds = http, load_seconds
        self._folder: Path | None = None
        self.mark = ""  # until the first load: tokens of weights that the server began with

    async def stream(self, continuation: Continuation) -> AsyncGenerator[Delta]:
        told = 0
        async with aclosing(self._http.events(_GENERATE, _body(continuation))) as events:
            async for event in events:
                delta = _delta(self._http.name, event, told, continuation.top_logprobs)
                told += len(delta.token_ids)
                yield with_own_versions(delta, self.mark)

    async def ready(self) -> bool:
        return await self._http.status("/model_info") == 200

    async def describe(self) -> Served:
        try:
            release = (await self._http.exchange("GET", "/server_info"))["version"]
            model = await self._http.exchange("GET", "/model_info")
            (listed, *_) = (await self._http.exchange("GET", "/v1/models"))["data"]
            path, _ = model["model_path"], model["weight_version"]
            context = listed.get("max_model_len")
            (architecture, *_) = model.get("architectures") or [None]
        except (WireError, AttributeError, KeyError, TypeError, ValueError) as error:
            raise WireError(f"{self._http.name} is no server that stretto can train with ({error}); {NEEDED}") from None
        context = None if context is None else context - _LAST_PLACES
        return Served(f"SGLang {release}", path, context, architecture)

    async def occupancy(self) -> Occupancy:
        try:
            ranks = (await self._http.exchange("GET", "/v1/loads?include=core", seconds=LOOK_SECONDS))["loads"]
            running, waiting = (sum(rank[key] for rank in ranks) for key in ("num_running_reqs", "num_waiting_reqs"))
            return Occupancy(running, waiting, max(rank["token_usage"] for rank in ranks))
        except (KeyError, TypeError, ValueError) as error:
            raise WireError(f"{self._http.name} does not say how full it is ({error!r})") from None

    async def score(self, token_ids: Sequence[int]) -> tuple[float, ...]:
        order = {
            "input_ids": list(token_ids),
            "return_logprob": True,
            "logprob_start_len": 0,
            "sampling_params": {"max_new_tokens": 1, "temperature": 1.0, "ignore_eos": True},
        }
        reply = await self._http.exchange("POST", _GENERATE, order)
        try:
            # Matched by position, because SGLang reports the last id of a vocabulary as 0.
            _, *scored = reply["meta_info"]["input_token_logprobs"]
            return tuple(float(logprob) for (logprob, *_), _ in zip(scored, token_ids[1:], strict=True))
        except (KeyError, TypeError, ValueError) as error:
            raise WireError(f"{self._http.name} does not score a text as SGLang documents it ({error!r})") from None

    async def pause(self, *, keep: bool) -> None:
        await self._http.exchange("POST", "/pause_generation", {"mode": "in_place" if keep else "retract"})
        if not keep:  # in place of the mode "abort", which polls only once a second
            await self._http.exchange("POST", "/abort_request", {"rid": "", "abort_all": True})

    async def load(self, folder: Path, version: int, *, keep: bool) -> None:
        self.mark = self.mark or new_mark()
        order = {"model_path": str(folder), "weight_version": f"{version}{self.mark}", "flush_cache": not keep}
        self._folder, path = folder, "/update_weights_from_disk"
        reply = await self._http.exchange("POST", path, order, self._load_seconds, lambda: self.read)
        if not isinstance(reply, dict) or not reply.get("success"):
            raise WireError(f"{self._http.name} has not loaded version {version}: {reply}")

    async def resume(self) -> None:
        await self._http.exchange("POST", "/continue_generation", {})

    async def held(self, folder: Path, shapes: Mapping[str, Sequence[int]]) -> Sequence[Mapping[str, str]]:
        self._folder, told = folder, msgspec.json.encode(shapes).decode()
        order = {"action": "stretto_held", "skip_tensor_list": [str(folder), told], "selector": "target"}
        try:
            reply = await self._http.exchange("POST", "/weights_checker", order, self._load_seconds, lambda: self.read)
        except WireError as error:
            if _WITHOUT_PLUGIN.search(str(error)):
                return ()
            raise  # the plugin has failed: a proof that is missing must not pass for one that cannot be asked for
        try:
            return [msgspec.convert(rank["checksums"], dict[str, str]) for rank in reply["ranks"]]
        except (KeyError, TypeError, msgspec.ValidationError) as error:
            raise WireError(f"{self._http.name} does not say what its workers hold ({error!r})") from None

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
            "--model-path": model,
            "--host": "127.0.0.1",
            "--port": str(port),
            "--dtype": config.dtype,
            "--max-running-requests": str(config.slots),
            "--stream-interval": "8",
        }
        environment = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(config.threads), "PYTHONPATH": FOLDER}
        flags: tuple[str, ...] = ("--incremental-streaming-output", "--skip-server-warmup", "--sleep-on-idle")
        if config.on_cpu:
            environment["SGLANG_USE_CPU_ENGINE"] = "1"
            options |= {"--device": "cpu", "--attention-backend": "torch_native", "--sampling-backend": "pytorch"}
            options |= {"--grammar-backend": "none", "--max-total-tokens": str(min(1 << 20, config.slots * 1024))}
            flags += ("--disable-overlap-schedule", "--disable-radix-cache", "--disable-cuda-graph")
        words = [word for option in options.items() for word in option]
        module = ("-m", "sglang.launch_server")
        return Launch((str(config.python), *module, *words, *flags, *config.arguments), environment)

    @staticmethod
    def flags_of_room(config: EngineConfig, model: str, room: Room) -> dict[str, str]:
        """Two flags that limit the server's GPU memory: the fraction of its share for weights and KV cache, and the
        tokens that `engine.cache_gib` holds. SGLang applies the fraction to the memory that is free at its start, which
        is the share or more."""
        free = max(1.0, room.share * room.memory)
        return {
            "--mem-fraction-static": f"{min(_MOST, ceil(room.planned / free * 1000) / 1000):.3f}",
            "--max-total-tokens": str(_tokens_of_gpus(config, model)),
        }


def _tokens_of_gpus(config: EngineConfig, model: str) -> int:
    """Number of tokens that the KV cache of one copy of the model holds (`engine.cache_gib` is that of all its copies,
    on all GPUs). KV heads are divided among the tensor parallel GPUs; if there are fewer heads than GPUs, they are
    replicated. `model`: model folder. Raises ModelFolderError as `inspect_model_folder`."""
    folder = inspect_model_folder(Path(model))
    heads, item = max(folder.kv_heads, config.tensor_parallel), 4 if config.dtype == "float32" else 2
    return config.cache_bytes // config.copies // (2 * folder.layers * heads * folder.head_dim * item)


def _body(wanted: Continuation) -> dict[str, object]:
    sampling = wanted.sampling
    return {
        "rid": wanted.id,
        "input_ids": list(wanted.token_ids),
        "stream": True,
        "return_logprob": True,
        "top_logprobs_num": wanted.top_logprobs,
        "sampling_params": {
            "max_new_tokens": wanted.max_tokens,
            "temperature": sampling.temperature,
            "sampling_seed": wanted.seed % (1 << 31),
            "stop_token_ids": list(sampling.stop_token_ids),
            # True would ignore `stop_token_ids` too. With False the model's own stop tokens also end a completion; the
            # adapter refuses such an end if the recipe does not list the token.
            "ignore_eos": not sampling.stop_token_ids,
        },
    }


def _delta(server: str, event: bytes, told: int, top: int) -> Delta:
    try:
        message = _EVENT.decode(event)
    except UNREADABLE as error:
        raise WireError(f"{server} sends an event that SGLang does not document ({error}): {event[:80]!r}") from None
    if message.error is not None:
        raise refused(server, _GENERATE, message.error.code, event)
    if (meta := message.meta_info) is None:
        return Delta()
    count, sent = meta.completion_tokens, len(meta.output_token_logprobs)
    if sent >= count:  # the last event of an aborted request repeats all tokens, after those still to be delivered
        new = slice(sent - count + told, sent)
    elif told + sent == count:
        new = slice(0, sent)
    else:
        raise WireError(f"{server} sends a completion with {count} tokens and {told + sent} log-probabilities")
    tokens, likeliest = meta.output_token_logprobs[new], meta.output_top_logprobs[new]
    return Delta(
        token_ids=tuple(token for _, token, _ in tokens),
        logprobs=tuple(logprob for logprob, _, _ in tokens),
        top_logprobs=tuple(tuple((id, value) for value, id, _ in found or ())[:top] for found in likeliest),
        ended=meta.finish_reason.type if meta.finish_reason is not None else "",
        spans=tuple((span.version, span.start, span.end) for span in meta.weight_versions or ()),
    )
