"""`stretto gateway`: one model folder behind sessions that agents use over HTTP, in this process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

import torch
import uvloop

from stretto.conversation.bridge import Renderer
from stretto.conversation.session import SessionRecord, WholeTurns
from stretto.conversation.tool_calls import form_of
from stretto.core.errors import EngineLost, RefusedRequest
from stretto.core.records import Completion, GenerateRequest, Sampling
from stretto.engine.backend import ENDED
from stretto.engine.http.lifecycle import GracefulServer, bind, run_app
from stretto.engine.native.completions import Progress
from stretto.engine.native.engine import NativeEngine
from stretto.engine.native.generation import Generation, SharedGeneration
from stretto.gateway.agent_session import Speaker
from stretto.gateway.app import GatewayApp
from stretto.gateway.checks import check_chat, check_reach
from stretto.gateway.config import GatewayConfig
from stretto.gateway.sampling import CallForms, SamplingRule
from stretto.gateway.sessions import RecordedSessions
from stretto.gateway.telling import Teller
from stretto.launch.assemble.agents import DIALECTS
from stretto.launch.commands.serve import (
    KEEP_ALIVE_SECONDS,
    PATIENCE_SECONDS,
    allow_many_connections,
    check_key,
    context_of,
    engine_config,
    say_aloud,
)
from stretto.model.hf.folder import inspect_model_folder
from stretto.model.hf.tokenizer import Tokenizer, load_tokenizer
from stretto.store import lock


class LocalGeneration:
    """The engine of this process as a client sees one (a `core.engine.Generate`)."""

    def __init__(self, generation: Generation) -> None:
        self._generation = generation

    async def __call__(self, *requests: GenerateRequest) -> AsyncIterator[Completion]:
        """See `Generate`; of requests of one completion."""
        for request in requests:
            await self._generation.prepare([request])
            listener = _OneCompletion(self._generation.engine.name)
            self._generation.submit(request, listener, every_token=False)
            try:
                yield await listener.ending  # the turn has the deadline
            finally:
                self._generation.close(request.id)


class _OneCompletion:
    """The completion of one request (a `generation.CompletionListener`)."""

    def __init__(self, engine: str) -> None:
        self.missing, self._engine = 1, engine
        self.ending: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()

    def progressed(self, progress: Progress) -> None:
        """See `CompletionListener`; the whole completion comes at its end."""

    def ended(self, completion: Completion) -> None:
        """See `CompletionListener`."""
        self.missing = 0
        if not self.ending.done():
            self.ending.set_result(completion)

    def refuse(self, error: RefusedRequest) -> None:
        """See `CompletionListener`."""
        if not self.ending.done():
            self.ending.set_exception(error)

    def break_off(self, why: str = ENDED) -> None:
        """See `CompletionListener`."""
        if not self.ending.done():
            self.ending.set_exception(EngineLost(self._engine, why))


def speaker_of(
    name: str, tokenizer: Tokenizer, sampling: Sampling, context: int, config: GatewayConfig, *, grammars: bool = False
) -> Speaker:
    """The words of a model; `grammars` says whether its engine follows them.

    Raises:
        ModelFolderError: the tokenizer has no chat template.
    """
    check_chat(tokenizer, tokenizer.place)
    forms = CallForms(form_of(tokenizer.chat_template), tokenizer.vocabulary) if grammars else None
    return Speaker(Renderer(tokenizer), Teller(name, tokenizer), SamplingRule(sampling, context, forms=forms), config)


def gateway(
    model: Path,
    *,
    host: str,
    port: int,
    folder: Path,
    name: str | None = None,
    api_key: str | None = None,
    overrides: Sequence[str] = (),
    say: Callable[[str], None] = say_aloud,
) -> None:
    """Serve sessions with a Hugging Face folder until SIGINT or SIGTERM; open turns are finished first.

    Args:
        folder: where the sessions are recorded; those that are recorded there go on.
        name: the model's name for clients; by default the folder's name.
        api_key: what opens sessions; without it, all that reach this machine's loopback address may.

    Raises:
        UserError: the folder, an override or the address is wrong.
    """
    config = engine_config(overrides)
    check_key(api_key)
    inspect_model_folder(model)
    tokenizer = load_tokenizer(model)
    bound = bind(host, port, "--port")
    check_reach(bound, api_key, "--host")
    folder.mkdir(parents=True, exist_ok=True)
    lock.acquire(folder)  # for as long as the process lives
    torch.set_num_threads(config.threads)
    engine = NativeEngine.load(model, config)
    generation, context = SharedGeneration(engine), context_of(engine, config)
    sampling = Sampling(max_tokens=context, stop_token_ids=tokenizer.eos_token_ids)
    name = model.resolve().name if name is None else name
    unserved = "the engine has none" if engine.grammars is None else engine.grammars.problem
    speaker = speaker_of(name, tokenizer, sampling, context, GatewayConfig(), grammars=not unserved)
    generate = LocalGeneration(generation)

    def sampler(session: str, record: SessionRecord) -> WholeTurns:
        return WholeTurns(generate, record, session)

    recorded = RecordedSessions(folder, speaker, sampler)
    sessions = recorded.load()
    app = GatewayApp(sessions, recorded, speaker, [kind() for kind in DIALECTS], operator_key=api_key or "")
    server = GracefulServer(app, generation, keep_alive_seconds=KEEP_ALIVE_SECONDS, patience=PATIENCE_SECONDS)
    allow_many_connections()
    bound.listen()  # from here on connections wait instead of being refused
    shown = f"[{host}]" if ":" in host else host
    say(f"{name}: context {context:,}, sessions recorded in {folder}")
    if unserved:
        say(f"response_format and tool_choice do not constrain what is sampled: {unserved}")
    say(f"gateway at http://{shown}:{bound.getsockname()[1]}")
    uvloop.run(run_app(server, [bound], generation))
