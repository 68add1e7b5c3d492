"""`stretto serve`: serve one model folder over HTTP, with an engine in a process of its own."""

from __future__ import annotations

import resource
import signal
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from stretto.core.errors import Problem, RecipeError, RoleDied
from stretto.core.machine import Seat
from stretto.core.records import Sampling
from stretto.core.tasks import run_beside
from stretto.engine.config import EngineConfig
from stretto.engine.http.lifecycle import GracefulServer, Parts, run_app
from stretto.engine.native.scheduler import longest_row_of
from stretto.launch.preflight.devices import usable_gpus
from stretto.launch.recipe.recipe import Recipe, override, validate
from stretto.loop.engines.pool import EnginePool
from stretto.model.hf.inspection import inspect_model_folder
from stretto.model.hf.tokenizer import Tokenizer, load_tokenizer
from stretto.processes import event_loop
from stretto.processes.heartbeat import survive_a_full_disk
from stretto.processes.http.asgi import HostNames, is_loopback
from stretto.processes.http.reach import bind, url_of
from stretto.processes.spawn import FRESH, Spawner
from stretto.processes.stopping import StopSignal, until_cut_short
from stretto.store import lock
from stretto_app.extensions.commands.evaluate import engines_of_folder
from stretto_app.extensions.preflight.embedded import check_embedded, seats_of_engines
from stretto_gateway.checks import check_key
from stretto_gateway.model import ServedModel
from stretto_gateway.requests import DISTRIBUTION, CallForms, SamplingRule
from stretto_gateway.serve.app import ServeApp
from stretto_gateway.serve.remote import RemoteEngine
from stretto_workflows.chat.tool_calls import form_of

PATIENCE_SECONDS = 30.0
_STOP_SECONDS = 1.0
_SHORTEST_CONTEXT = 2  # tokens: one of the prompt, one of the completion
_MESSAGES = "model.special_tokens_in_messages"
_OF_A_RUN = {"transport": "give --host and --port", "base_port": "give --port"}


def recipe_of_engines(
    model: Path,
    overrides: Sequence[str],
    refused: Mapping[str, str] = MappingProxyType({}),
    sections: tuple[str, ...] = ("engine",),
) -> Recipe:
    """Recipe for a given model, from overrides ``SECTION.key=value`` of these `sections` (and of the one key
    ``model.special_tokens_in_messages``). `refused`: names of keys of [engine] that have no meaning here, besides those
    for runs alone, each with the remedy.

    Raises:
        RecipeError: overrides are malformed, of another section or refused, or a value is invalid; lists them.
    """
    refused = {f"engine.{name}": instead for name, instead in (_OF_A_RUN | {**refused}).items()}
    keys = [word.partition("=")[0].strip() for word in overrides]
    problems = [
        Problem(key, "is no setting here", f"give {' or '.join(f'{section}.key=value' for section in sections)}")
        for key in keys
        if key.partition(".")[0] not in sections and key != _MESSAGES
    ]
    problems += [Problem(key, "has no meaning for a server", refused[key]) for key in keys if key in refused]
    if problems:
        raise RecipeError(problems)
    tree: dict[str, Any] = {"model": {"path": str(model)}, "task": {"kind": "arithmetic"}, "trainer": {}}
    override(tree, overrides)
    return validate(tree, "command line", overrides)


def say_aloud(text: str) -> None:
    print(text, flush=True)  # flushed: another program may wait for the address


def serve(
    model: Path,
    *,
    host: str,
    port: int,
    name: str | None = None,
    api_key: str | None = None,
    overrides: Sequence[str] = (),
    spawner: Spawner = FRESH,
) -> None:
    """Serve a Hugging Face folder until SIGINT or SIGTERM; open requests are finished first, for at most 30 seconds. An
    engine that dies is replaced.

    Args:
        name: the model's name for clients; by default the folder's name.
        api_key: required as ``Authorization: Bearer KEY``, except for /health; None: no key is needed.
        spawner: starts the engine's process.

    Raises:
        UserError: the folder, an override or the address is wrong.
        RoleError: the engine does not start, or has died too often.
        SystemExit: a signal ended it before it served, or a second signal came.
    """
    recipe = recipe_of_engines(Path(), overrides, {"count": "one engine is served"}, ("engine", "deadlines"))
    check_embedded(recipe.engine)
    config, as_tokens = recipe.engine, recipe.model.special_tokens_in_messages
    check_key(api_key, "--api-key")
    folder = inspect_model_folder(model)
    tokenizer = load_tokenizer(model, special_tokens_in_messages=as_tokens)
    context = context_of(longest_row_of(folder, config), config)
    seats = seats_of_engines(recipe, folder, usable_gpus(recipe))
    bound = bind(host, port, ("--host", "--port"))
    rule = rule_of(tokenizer, context, grammars=True, seeds=True, vocabulary=folder.vocab_size)
    served = ServedModel(model.resolve().name if name is None else name, tokenizer, rule, reasoning=False)
    names = HostNames(host, loopback=True) if api_key is None and is_loopback(bound) else None

    def parts(engines: EnginePool) -> Parts:
        [(name, address)] = engines.addresses.items()
        watched = engines.engine(name)
        engine = RemoteEngine(name, address, recipe.deadlines.load, watched.suspect, watched.restarts.progressed)
        app = ServeApp(engine, served, engine.pass_on, api_key=api_key or "", names=names)
        return app, engine, lambda: run_beside(engines.supervise(), engine.run())

    allow_many_connections()
    whole = "" if context == folder.context_length else f" of {folder.context_length:,} (engine.cache_gib)"
    about = f"{folder.parameters:,} parameters, context {context:,}{whole}, {config.dtype}"
    say_aloud(f"{served.name}: {folder.architecture}, {about}")
    if api_key is None and not is_loopback(bound):
        say_aloud("warning: other machines may use this server without a key; give --api-key (docs/how_to/gateway.md)")
    told = f"serving at {url_of(host, bound.getsockname()[1])}/v1"
    until_cut_short(
        run_with_engines(recipe, folder.path, parts, bound, told, spawner=spawner, seats=seats),
        event_loop.new_event_loop,
    )


async def run_with_engines(
    recipe: Recipe,
    model: Path,
    parts: Callable[[EnginePool], Parts],
    bound: socket.socket,
    told: str,
    *,
    spawner: Spawner,
    seats: tuple[Seat, ...] = (),
    logs: Path | None = None,
    say: Callable[[str], None] = say_aloud,
) -> None:
    """Start the engines of a server without a trainer, then serve until a signal.

    Args:
        model: model folder.
        parts: makes the application from the engines, which are not started yet.
        bound: where to listen.
        told: line that says so.
        seats: assignment of engines to GPUs; empty: they run on the CPU.
        logs: folder for the engines' logs; None: a temporary folder, which is kept if an engine's end ends the server.

    Raises:
        RoleError: an engine does not start, or has died too often.
        SystemExit: a signal ended it before it served.
    """
    stopped, (sockets, held), kept = StopSignal(), lock.temporary_folder(), False
    engines = engines_of_folder(recipe, model, sockets, logs or sockets, spawner, seats, say)
    try:
        app, work, run = parts(engines)
        await stopped.unless(engines.start(0))
        if stopped.requested:
            sys.exit(stopped.exit_code)
        # `stopped` handles signals, also while the engines start
        server = GracefulServer(app, work, patience=PATIENCE_SECONDS, signals=False)
        stopped.call(partial(server.handle_exit, signal.SIGTERM, None))
        stopped.call(lambda: say(_waits(work.open_requests)) if work.open_requests else None)
        bound.listen()  # from here on connections wait instead of being refused
        say(told)
        survive_a_full_disk()  # nor does a reader of our output that ends, such as `head`, end a server
        await run_app(server, [bound], run)
    except RoleDied:
        kept = logs is None  # the error names the log
        raise
    finally:
        await engines.stop(_STOP_SECONDS)
        lock.let_go(sockets, held, kept=kept)


def _waits(requests: int) -> str:
    return f"stopping: open requests ({requests}) have {PATIENCE_SECONDS:.0f} s to finish; a second signal ends it now"


def rule_of(
    tokenizer: Tokenizer,
    context: int,
    *,
    grammars: bool,
    chosen: tuple[str, ...] = DISTRIBUTION,
    seeds: bool = False,
    vocabulary: int = 2**31,
) -> SamplingRule:
    """Sampling rule for the clients of a model.

    Args:
        context: most tokens of a prompt with its completion.
        grammars: whether the engines support grammars.
        chosen: sampling options that clients may set.
        seeds: whether clients may set a seed.
        vocabulary: number of the model's tokens; a `top_k` of at least this filters nothing.
    """
    default = Sampling(max_tokens=context, stop_token_ids=tokenizer.eos_token_ids)
    forms = CallForms(form_of(tokenizer.chat_template), tokenizer.vocabulary) if grammars else None
    return SamplingRule(default, context, chosen, forms, seeds, vocabulary)


def context_of(longest_row: int, config: EngineConfig) -> int:
    """Context length to serve, in tokens of a prompt with its completion: `longest_row`, the most that fit into the KV
    cache.

    Raises:
        RecipeError: the KV cache is too small for any request.
    """
    if longest_row < _SHORTEST_CONTEXT:
        found = f"{config.cache_gib:g} is too small a KV cache for any prompt with a completion"
        raise RecipeError([Problem("engine.cache_gib", found, "give more")])
    return longest_row


def allow_many_connections() -> None:
    """Raise this process's soft limit of open files (often 1,024) to the hard limit, because each connection needs
    one."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
