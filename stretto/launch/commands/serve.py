"""`stretto serve`: one model folder behind OpenAI's interface, in this process."""

from __future__ import annotations

import resource
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import uvloop
from torch import Tensor

from stretto.core.errors import Problem, RecipeError, WireError
from stretto.engine.config import EngineConfig
from stretto.engine.http.lifecycle import GracefulServer, bind, run_app
from stretto.engine.http.server import EngineApp
from stretto.engine.native.engine import NativeEngine
from stretto.engine.native.generation import SharedGeneration
from stretto.engine.openai.app import OpenAIApp
from stretto.engine.openai.translate import ServedModel
from stretto.launch.recipe.recipe import override, validate
from stretto.model.hf.folder import inspect_model_folder
from stretto.model.hf.tokenizer import load_tokenizer

_KEEP_ALIVE_SECONDS = 120
_PATIENCE_SECONDS = 30.0
_SHORTEST_CONTEXT = 2  # tokens: one of the prompt, one of the answer
_OF_A_RUN = {"count": "one engine is served", "transport": "--host and --port say where", "base_port": "give --port"}


class NoMailbox:
    """The weights are those of the folder (satisfies `weights.mailbox.Subscriber`)."""

    def newest(self) -> int | None:
        return None

    def load(self, version: int) -> Mapping[str, Tensor]:
        """
        Raises:
            WireError: always; nothing is ever published here.
        """
        raise WireError(
            f"version {version} cannot be loaded: this server serves its folder, and no run publishes to it"
        )


def engine_config(overrides: Sequence[str]) -> EngineConfig:
    """The `[engine]` section from ``engine.key=value`` words.

    Raises:
        RecipeError: a word is not of this form, or its value is not allowed (all of them).
    """
    keys = [word.partition("=")[0].strip() for word in overrides]
    problems = [
        Problem(f"{key}", "is no setting of the engine", "only engine.key=value is understood here")
        for key in keys
        if not key.startswith("engine.")
    ]
    problems += [
        Problem(key, "has no meaning for a server", _OF_A_RUN[name])
        for key in keys
        if (name := key.removeprefix("engine.")) in _OF_A_RUN and key.startswith("engine.")
    ]
    if problems:
        raise RecipeError(problems)
    tree: dict[str, Any] = {"model": {"path": "."}, "task": {"kind": "arithmetic"}, "trainer": {}}
    override(tree, overrides)
    return validate(tree, "stretto serve").engine


def _say(text: str) -> None:
    print(text, flush=True)  # whoever started this waits for the address


def serve(
    model: Path,
    *,
    host: str,
    port: int,
    name: str | None = None,
    overrides: Sequence[str] = (),
    say: Callable[[str], None] = _say,
) -> None:
    """Serve a Hugging Face folder until SIGINT or SIGTERM; open requests are finished first.

    Args:
        name: what clients call the model; the name of the folder if None.

    Raises:
        UserError: the folder, an override or the address is not what it should be.
    """
    config = engine_config(overrides)
    folder = inspect_model_folder(model)
    tokenizer = load_tokenizer(model)
    listening = bind(host, port, "--port")
    torch.set_num_threads(config.threads)
    engine = NativeEngine.load(model, config)
    generation = SharedGeneration(engine)
    context = _context(engine, config)
    served = ServedModel(model.resolve().name if name is None else name, context, folder.vocab_size)
    app = OpenAIApp(generation, served, tokenizer, EngineApp(generation, NoMailbox()))
    server = GracefulServer(app, generation, keep_alive_seconds=_KEEP_ALIVE_SECONDS, patience=_PATIENCE_SECONDS)
    _allow_many_connections()
    listening.listen()  # from here on connections wait for the server instead of being refused
    shown = f"[{host}]" if ":" in host else host
    whole = "" if context == folder.context_length else f" of {folder.context_length:,} (engine.cache_gib)"
    about = f"{folder.parameters:,} parameters, context {context:,}{whole}, {config.dtype}"
    say(f"{served.name}: {folder.architecture}, {about}")
    say(f"serving at http://{shown}:{listening.getsockname()[1]}/v1")
    uvloop.run(run_app(server, [listening], generation))


def _context(engine: NativeEngine, config: EngineConfig) -> int:
    """Tokens that a prompt and its answer may have together.

    Raises:
        RecipeError: the cache holds no prompt with an answer.
    """
    if (context := engine.longest_row) < _SHORTEST_CONTEXT:
        found = f"{config.cache_gib:g}, which holds the keys and values of no prompt with an answer"
        raise RecipeError([Problem("engine.cache_gib", found, "give more")])
    return context


def _allow_many_connections() -> None:
    """Each connection is an open file, and the soft limit is often 1,024."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
