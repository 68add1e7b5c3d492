"""`stretto gateway`: serve one model folder to agents as sessions over HTTP, with engines of any make."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import NoReturn

from stretto.core.errors import EngineLost, Problem, RunFolderError
from stretto.core.forest import TurnRequest
from stretto.core.records import Completion, GenerateRequest, Segment
from stretto.core.tasks import gather_or_cancel
from stretto.engine.config import EngineConfig, capabilities_of
from stretto.engine.http.lifecycle import Parts
from stretto.engine.native.scheduler import longest_row_of
from stretto.launch.preflight.checks import check_engine_keys, check_of_servers
from stretto.launch.preflight.devices import usable_gpus
from stretto.loop.engines.pool import EnginePool
from stretto.model.hf.grammar import Grammars
from stretto.model.hf.inspection import ModelFolder, inspect_model_folder
from stretto.model.hf.tokenizer import Tokenizer, load_tokenizer
from stretto.processes import event_loop
from stretto.processes.http.asgi import HostNames, is_loopback
from stretto.processes.http.reach import bind, url_of
from stretto.processes.spawn import FRESH, Spawner
from stretto.processes.stopping import until_cut_short
from stretto.store import lock
from stretto_app.extensions.commands.serve import (
    allow_many_connections,
    context_of,
    recipe_of_engines,
    rule_of,
    run_with_engines,
    say_aloud,
)
from stretto_app.extensions.preflight.embedded import seats_of_engines
from stretto_gateway.checks import check_chat, check_key, check_reach
from stretto_gateway.model import ServedModel
from stretto_gateway.requests import DISTRIBUTION
from stretto_gateway.sessions.app import GatewayApp
from stretto_gateway.sessions.sessions import RecordedSessions
from stretto_verify.thoughts import PIECES
from stretto_workflows.session import Sampler, SessionRecord, WholeTurns
from stretto_workflows.sessions import persistently

_LOOKS = 6  # of the longest wait for an answer, a part after which an engine may be silent
_PROBE = [{"role": "user", "content": "1+1="}]  # prompt that other servers must tokenize alike


class _Turns:
    """Generates the turns of all sessions by a pool of engines. Implements `core.engine.Generate`, and the work of a
    `GracefulServer`: what it runs, counts and breaks off when it stops."""

    def __init__(self, engines: EnginePool, patience: float) -> None:
        """Generate by `engines`. `patience`: seconds of a turn; once one has taken longer, silent engines are replaced
        (`EnginePool.suspect_silent`)."""
        self.stopping, self.open_requests = False, 0  # a turn that waits for an engine counts as open
        self._engines, self._patience, self._over = engines, patience, False
        self._late = asyncio.Event()

    def __call__(self, *requests: GenerateRequest) -> AsyncIterator[Completion]:
        """Sample the completions of `requests` with the pool, and yield each one when it ends (`Generate`).

        Raises:
            EngineLost: the gateway is stopping.
        """
        if self._over:
            raise EngineLost("the gateway", "is stopping")
        return self._engines.generate(*requests)

    def break_off(self) -> None:
        """Interrupt every turn, and refuse new ones: from now on calls raise EngineLost."""
        self.stopping = self._over = True
        self._engines.break_off()

    async def run(self) -> None:
        """Replace engines that die, until cancelled. Then all open turns are interrupted.

        Raises:
            RoleDied: an engine has died too often.
        """
        try:
            await gather_or_cancel(self._engines.supervise(), self._look())
        finally:
            self.break_off()

    async def _look(self) -> NoReturn:
        while True:
            await self._late.wait()
            self._late.clear()
            await self._engines.suspect_silent()

    def sampler(self, session: str, record: SessionRecord) -> Sampler:
        """Create the sampler of the session with the id `session`, whose turns go on `record` (implements
        `stretto_gateway.sessions.sessions.MakeSampler`).

        If the engine of a turn is lost, another engine samples the turn again, even if the gateway has begun to stop
        meanwhile. For a turn that begins while the gateway stops, the sampler raises EngineLost.
        """
        whole = WholeTurns(self, record, session)

        async def sample(request: TurnRequest) -> Segment:
            if self.stopping:
                raise EngineLost("the gateway", "is stopping")
            self.open_requests += 1
            # Then an event loop may hang whose heartbeats go on.
            late = asyncio.get_running_loop().call_later(self._patience, self._late.set)
            try:
                return await persistently(whole, request)
            finally:
                late.cancel()
                self.open_requests -= 1

        return sample


def session_model(
    name: str,
    tokenizer: Tokenizer,
    context: int,
    *,
    grammars: bool = False,
    chosen: tuple[str, ...] = DISTRIBUTION,
) -> ServedModel:
    """Describe the model behind the sessions, with its `name` for clients and its context length in tokens.

    Args:
        grammars: whether its engines support grammars.
        chosen: sampling options that clients may set.

    Raises:
        ModelFolderError: the tokenizer has no chat template.
    """
    check_chat(tokenizer, tokenizer.place)
    return ServedModel(name, tokenizer, rule_of(tokenizer, context, grammars=grammars, chosen=chosen))


def gateway(
    model: Path,
    *,
    host: str,
    port: int,
    folder: Path,
    name: str | None = None,
    api_key: str | None = None,
    overrides: Sequence[str] = (),
    spawner: Spawner = FRESH,
    say: Callable[[str], None] = say_aloud,
) -> None:
    """Serve a Hugging Face folder to agents as sessions, until SIGINT or SIGTERM; open turns are finished first, for at
    most 30 seconds.

    Args:
        folder: where sessions are recorded. Sessions on record are resumed.
        name: the model's name for clients; by default the folder's name.
        api_key: key that is required to open sessions; None: every user of this machine may open them.

    Raises:
        UserError: the folder, an override, a server or the address is wrong.
        RoleError: an engine does not start, or has died too often.
        SystemExit: a signal ended it before it served, or a second signal came.
    """
    recipe = recipe_of_engines(model, overrides, sections=("engine", "deadlines"))
    check_key(api_key, "--api-key")
    check_engine_keys(recipe)
    base, as_tokens = inspect_model_folder(model.resolve()), recipe.model.special_tokens_in_messages
    tokenizer = load_tokenizer(model, special_tokens_in_messages=as_tokens, kept=PIECES)
    check_of_servers("check_model", recipe, base)
    context = context_of(longest_row_of(base, recipe.engine), recipe.engine)
    check_of_servers("check_window", recipe, base, context)
    unserved = _without_grammars(recipe.engine, base, tokenizer)
    filtered = recipe.engine.kind == "native" or capabilities_of(recipe.engine.kind).filtered_logprobs
    chosen = DISTRIBUTION if filtered else ("temperature",)
    served = session_model(name or base.path.name, tokenizer, context, grammars=not unserved, chosen=chosen)
    probe = [tokenizer.encode_chat(_PROBE)] if recipe.engine.addresses else []
    check_of_servers("check_servers", recipe, base, tokenizer, probe, True)  # clients choose temperatures
    seats = seats_of_engines(recipe, base, usable_gpus(recipe))
    bound = bind(host, port, ("--host", "--port"))
    check_reach(bound, api_key, "--host")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        bound.close()
        found = f"cannot be made: {error.strerror}"
        raise RunFolderError([Problem(f"--folder {folder}", found, "give another folder")]) from None
    lock.acquire(folder)  # for as long as the process lives
    allow_many_connections()
    say(f"{served.name}: context {context:,}, sessions recorded in {folder}")
    if unserved:
        say(f"response_format and tool_choice do not constrain what is sampled: {unserved}")
    names = HostNames(host, loopback=True) if is_loopback(bound) else None

    def parts(engines: EnginePool) -> Parts:
        turns = _Turns(engines, recipe.deadlines.answer / _LOOKS)
        recorded = RecordedSessions(folder, served, turns.sampler)
        app = GatewayApp(recorded.load(), recorded, served, operator_key=api_key or "", names=names)
        for which, why in recorded.set_aside.items():
            say(f"{which} is set aside, and the other sessions go on: {why}")
        return app, turns, turns.run

    told = f"gateway at {url_of(*bound.getsockname()[:2])}"
    until_cut_short(
        run_with_engines(recipe, base.path, parts, bound, told, spawner=spawner, seats=seats, logs=folder, say=say),
        event_loop.new_event_loop,
    )


def _without_grammars(config: EngineConfig, base: ModelFolder, tokenizer: Tokenizer) -> str:
    """Reason why the engines support no grammars; "" if they do."""
    if config.kind != "native":
        return f"servers of {capabilities_of(config.kind).name} are given no grammars"
    return Grammars(lambda: tokenizer, base.vocab_size).problem
