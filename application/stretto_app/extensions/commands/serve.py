"""`stretto serve`: serve one model folder over HTTP, with an engine in this process."""

from __future__ import annotations

import os
import resource
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from stretto.core.errors import Problem, RecipeError
from stretto.core.records import Sampling
from stretto.engine.config import EngineConfig
from stretto.engine.http.lifecycle import GracefulServer, run_app
from stretto.engine.http.server import EngineApp
from stretto.engine.native.engine import NativeEngine
from stretto.engine.native.generation import SharedGeneration
from stretto.launch.preflight.devices import usable_gpus
from stretto.launch.recipe.recipe import Recipe, override, validate
from stretto.model.device import take_share
from stretto.model.hf.folder import inspect_model_folder
from stretto.model.hf.inspection import ModelFolder
from stretto.model.hf.tokenizer import Tokenizer, load_tokenizer
from stretto.processes import event_loop
from stretto.processes.http.asgi import HostNames, is_loopback
from stretto.processes.http.reach import bind, url_of
from stretto_app.extensions.preflight.embedded import check_embedded, seat_alone
from stretto_gateway.checks import check_key
from stretto_gateway.model import ServedModel
from stretto_gateway.requests import DISTRIBUTION, CallForms, SamplingRule
from stretto_gateway.serve.app import ServeApp
from stretto_workflows.chat.tool_calls import form_of

PATIENCE_SECONDS = 30.0
_SHORTEST_CONTEXT = 2  # tokens: one of the prompt, one of the completion
_MESSAGES = "model.special_tokens_in_messages"
_OF_A_RUN = {"transport": "give --host and --port", "base_port": "give --port"}


def take_gpu(recipe: Recipe, folder: ModelFolder) -> None:
    """Choose the GPU with the most free memory for the engine with the model in `folder`, as the process's current
    device, and limit the process to its share of it. Does nothing for an engine on the CPU. Must be called before the
    first tensor is created.

    Raises:
        RecipeError: there are GPUs that this torch cannot use, or with far too little memory.
    """
    os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")  # same numbers as in nvidia-smi
    there = usable_gpus(recipe)
    if (seat := seat_alone(recipe.engine, folder, there)) is not None:
        torch.cuda.set_device(there.index(seat.gpus[0]))
        take_share(seat.share)


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
) -> None:
    """Serve a Hugging Face folder until SIGINT or SIGTERM; open requests are finished first, for at most 30 seconds.

    Args:
        name: the model's name for clients; by default the folder's name.
        api_key: required as ``Authorization: Bearer KEY``, except for /health; None: no key is needed.

    Raises:
        UserError: the folder, an override or the address is wrong.
    """
    recipe = recipe_of_engines(Path(), overrides, {"count": "one engine is served"})
    check_embedded(recipe.engine)
    config, as_tokens = recipe.engine, recipe.model.special_tokens_in_messages
    check_key(api_key, "--api-key")
    folder = inspect_model_folder(model)
    tokenizer = load_tokenizer(model, special_tokens_in_messages=as_tokens)
    bound = bind(host, port, f"--port: {host}:{port}")
    torch.set_num_threads(config.threads)
    take_gpu(recipe, folder)
    engine = NativeEngine.load(model, config)
    generation = SharedGeneration(engine)
    context = context_of(engine.longest_row, config)
    rule = rule_of(tokenizer, context, grammars=True, seeds=True, vocabulary=folder.vocab_size)
    served = ServedModel(model.resolve().name if name is None else name, tokenizer, rule, reasoning=False)
    names = HostNames(host, loopback=True) if api_key is None and is_loopback(bound) else None
    app = ServeApp(generation, served, EngineApp(generation), api_key=api_key or "", names=names)
    server = GracefulServer(app, generation, patience=PATIENCE_SECONDS)
    allow_many_connections()
    bound.listen()  # from here on connections wait instead of being refused
    whole = "" if context == folder.context_length else f" of {folder.context_length:,} (engine.cache_gib)"
    about = f"{folder.parameters:,} parameters, context {context:,}{whole}, {config.dtype}"
    say_aloud(f"{served.name}: {folder.architecture}, {about}")
    if api_key is None and not is_loopback(bound):
        say_aloud("warning: other machines may use this server without a key; give --api-key (docs/how_to/gateway.md)")
    say_aloud(f"serving at {url_of(host, bound.getsockname()[1])}/v1")
    event_loop.run(run_app(server, [bound], generation.run))


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
