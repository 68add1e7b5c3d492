"""A gateway on loopback in the test's own event loop, and a model that is a small real one: it says what a script says,
in tokens that no encoder would choose."""

import asyncio
import functools
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import httpx
import torch
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

from stretto.core.forest import TurnRequest
from stretto.core.records import Sampling, Segment, StopReason
from stretto.launch.recipe.extensions import GatewayConfig
from stretto.model.hf.folder import quiet_transformers
from stretto.model.hf.tokenizer import Tokenizer
from stretto.processes.http.asgi import LOOPBACK, HostNames
from stretto.processes.http.server import HttpServer, settings_of
from stretto_gateway.model import ServedModel
from stretto_gateway.requests import CallForms, SamplingRule
from stretto_gateway.sessions.agent_session import AgentSession
from stretto_gateway.sessions.app import GatewayApp
from stretto_gateway.sessions.sessions import RecordedSessions
from stretto_workflows.session import Sampler, SessionRecord
from tests.tiny_policy import sized

TEMPLATES = Path(__file__).parent / "templates"
MODEL = "scripted"
CONTEXT = 100_000
SPECIAL = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|begin_of_text|>", "<|eot_id|>", "<|start_header_id|>"),
    *("<|end_header_id|>", "<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
    *("[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
)
ENDS = {"qwen2_5": "<|im_end|>", "qwen3": "<|im_end|>", "llama": "<|eot_id|>", "mistral": "</s>"}


def tokenizer_of(template: str = "qwen2_5") -> Tokenizer:
    """Bytes, a few longer pieces, the special tokens of the families, and one of the templates beside this file."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: at for at, token in enumerate([*alphabet, "th", "the", "us", "er"])}
    backend = Backend(models.BPE(vocabulary, [("t", "h"), ("th", "e"), ("u", "s"), ("e", "r")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    whole = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token=ENDS[template])
    whole.chat_template = (TEMPLATES / f"{template}.jinja").read_text()
    return Tokenizer(template, (whole.eos_token_id,), whole, whole.backend_tokenizer)


@functools.cache
def shared_tokenizer() -> Tokenizer:
    """One for all tests that do not change it."""
    return tokenizer_of()


def wished(path: str, *, tool: Any = None, schema: Any = None, one: bool = False) -> dict[str, Any]:
    """A question in the dialect of a path, which ends in ``chat/completions``, ``responses`` or ``messages``.

    Args:
        path: where it is asked.
        tool: schema of the arguments of ``add``, a tool that has to be called.
        schema: that of the JSON which has to be answered.
        one: there may be one call, and it follows its schema.
    """
    ask, form = [{"role": "user", "content": "1+2?"}], {"type": "json_schema", "schema": schema}
    plain: dict[str, Any]
    if path.endswith("chat/completions"):
        function = {"name": "add", "parameters": tool, **({"strict": True} if one else {})}
        plain = {"messages": ask}
        called: dict[str, Any] = {"tools": [{"type": "function", "function": function}], "tool_choice": "required"}
        called |= {"parallel_tool_calls": False} if one else {}
        shaped: dict[str, Any] = {
            "response_format": {"type": "json_schema", "json_schema": {"name": "sum", "schema": schema}}
        }
    elif path.endswith("responses"):
        plain = {"input": ask}
        called = {"tools": [{"type": "function", "name": "add", "parameters": tool}]}
        called |= {"tool_choice": {"type": "function", "name": "add"}}
        shaped = {"text": {"format": {"name": "sum", **form}}}
    else:
        plain = {"messages": ask, "max_tokens": 200}
        called = {"tools": [{"name": "add", "input_schema": tool}], "tool_choice": {"type": "any"}}
        called["tool_choice"] |= {"disable_parallel_tool_use": True} if one else {}
        shaped = {"output_config": {"format": form}}
    return {"model": MODEL, **plain, **(called if tool else {}), **(shaped if schema else {})}


def build_chat_model(folder: Path, context: int = 512) -> Path:
    """A tiny Llama that speaks ChatML in bytes."""
    tokenizer = tokenizer_of("qwen2_5")
    shape = sized(len(tokenizer.vocabulary), 32, inner=48, layers=2, heads=(2, 1), max_position_embeddings=context)
    config = LlamaConfig(**shape, initializer_range=0.3, eos_token_id=tokenizer.eos_token_ids[0])
    with torch.random.fork_rng(devices=()), quiet_transformers():
        torch.manual_seed(5)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer._whole.save_pretrained(folder)
    return folder


class SpeakingModel(Protocol):
    """What stands behind a gateway."""

    @property
    def tokenizer(self) -> Tokenizer: ...

    def sampler(self, name: str, record: SessionRecord) -> Sampler: ...


@dataclass
class ScriptedModel:
    """Says what its script makes of the text of the prompt, one byte a token, and ends it with its end token.

    Attributes:
        asked: every prompt, in tokens.
        gate: turns wait for it, when there is one, after their first token.
        broken_off: turns that nobody waited for any more.
    """

    script: Callable[[str], str]
    tokenizer: Tokenizer = field(default_factory=shared_tokenizer)
    asked: list[tuple[int, ...]] = field(default_factory=list)
    gate: asyncio.Event | None = None
    running: int = 0
    broken_off: int = 0

    def sampler(self, name: str, record: SessionRecord) -> Sampler:
        """See `stretto_gateway.sessions.sessions.MakeSampler`."""

        async def sample(request: TurnRequest) -> Segment:
            self.asked.append(request.prompt)
            self.running += 1
            try:
                if self.gate is not None:
                    await self.gate.wait()
                segment = self._said(request)
            except asyncio.CancelledError:
                self.broken_off += 1
                raise
            finally:
                self.running -= 1
            record.journal(request.node, segment)
            return segment

        return sample

    def _said(self, request: TurnRequest) -> Segment:
        text = self.script(self.tokenizer.spell(request.prompt))
        byte_by_byte = [token for letter in text for token in self.tokenizer.encode(letter, special_tokens=False)]
        tokens = (*byte_by_byte, self.tokenizer.eos_token_ids[0])[: request.sampling.max_tokens]
        whole = len(tokens) == len(byte_by_byte) + 1
        return Segment.of(
            token_ids=tokens,
            behavior_logprobs=tuple(-0.01 * (at % 7 + 1) for at in range(len(tokens))),
            versions=(3,) * len(tokens),
            stop_reason=StopReason.STOP if whole else StopReason.LENGTH,
            engines=(("scripted", len(tokens)),),
        )


def model_of(
    tokenizer: Tokenizer, config: GatewayConfig | None = None, context: int = CONTEXT, forms: CallForms | None = None
) -> ServedModel:
    rule = SamplingRule(Sampling(max_tokens=context, stop_token_ids=tokenizer.eos_token_ids), context, forms=forms)
    return ServedModel(MODEL, tokenizer, rule, config or GatewayConfig())


@dataclass
class ServedGateway:
    """A running gateway, and a client of its address."""

    app: GatewayApp
    client: httpx.AsyncClient
    address: str

    async def open(self, **task: Any) -> dict[str, str]:
        """``POST /sessions``."""
        reply = await self.client.post("/sessions", json={"task": task})
        assert reply.status_code == 200, reply.text
        return dict(reply.json())

    def held(self, session: dict[str, str]) -> AgentSession:
        """What the gateway knows of a session."""
        found = self.app.sessions.named(session["id"])
        assert found is not None
        return found

    async def chat(self, session: dict[str, str], messages: list[Any], **fields: Any) -> httpx.Response:
        """``POST`` of a chat completion in a session."""
        headers = {"Authorization": f"Bearer {session['api_key']}", **fields.pop("headers", {})}
        body = {"model": MODEL, "messages": messages, **fields}
        return await self.client.post("/v1/chat/completions", json=body, headers=headers)

    async def shown(self, session: dict[str, str]) -> dict[str, Any]:
        """``GET /sessions/ID``."""
        return dict((await self.client.get(f"/sessions/{session['id']}")).json())


@asynccontextmanager
async def served_gateway(
    model: SpeakingModel,
    folder: Path,
    *,
    operator_key: str = "",
    config: GatewayConfig | None = None,
    context: int = CONTEXT,
    sessions: int = 4096,
    forms: CallForms | None = None,
    names: HostNames | None = LOOPBACK,
) -> AsyncIterator[ServedGateway]:
    """A gateway that records into `folder`, with what is recorded there."""
    served = model_of(model.tokenizer, config, context, forms)
    host = RecordedSessions(folder, served, model.sampler, sessions)
    table = host.load()
    bound = socket.create_server(("127.0.0.1", 0))
    address = f"http://127.0.0.1:{bound.getsockname()[1]}"
    app = GatewayApp(table, host, served, operator_key=operator_key, names=names)
    server = HttpServer(settings_of(app), signals=False)
    serving = asyncio.create_task(server.serve([bound]))
    try:
        # Nothing is encrypted here, and to read the certificates takes longer than most tests.
        async with httpx.AsyncClient(base_url=address, timeout=30, verify=False) as client:
            while not server.started:
                await asyncio.sleep(0.005)
            yield ServedGateway(app, client, address)
    finally:
        server.should_exit = True
        server.force_exit = True
        await serving
        bound.close()


@asynccontextmanager
async def one_session(
    model: SpeakingModel, folder: Path, **settings: Any
) -> AsyncIterator[tuple[ServedGateway, dict[str, str]]]:
    """A gateway as `served_gateway`, and a session that it has opened."""
    async with served_gateway(model, folder, **settings) as gateway:
        yield gateway, await gateway.open()
