"""`stretto tinker`: serve one model folder to programs that are written against Tinker's SDK."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import torch

from stretto.core.errors import Problem, RecipeError, several
from stretto.engine.http.lifecycle import GracefulServer, run_app
from stretto.processes import event_loop
from stretto.processes.http.asgi import HostNames, is_loopback
from stretto.processes.http.reach import bind, url_of
from stretto_app.extensions.commands.serve import allow_many_connections, recipe_of_engines, say_aloud
from stretto_app.extensions.preflight.embedded import check_embedded
from stretto_tinker.compute.base import LocalBackend
from stretto_tinker.serve import TinkerServer

_REFUSED = {
    "count": "one engine is served",
    "dtype": "models of clients are trained and sampled in float32",
    "on_update": "a sampler keeps the weights of its name",
    "load_interval": "a sampler keeps the weights of its name",
}
_HEEDED = "trainer.micro_batch_tokens"
_TURN = f"{_HEEDED}=1024"  # small, because other clients wait for the current micro-batch
_PREFIX = "tml-"
_PATIENCE_SECONDS = 1.0


def tinker(
    model: Path,
    *,
    host: str,
    port: int,
    folder: Path,
    name: str | None = None,
    keys: Sequence[str] = (),
    models_gib: float | None = None,
    overrides: Sequence[str] = (),
) -> None:
    """Serve a Hugging Face folder until SIGINT or SIGTERM. Acknowledged requests survive; the next start on the same
    folder continues them.

    Args:
        folder: where requests, results and weights are kept.
        name: the base model's name for clients; by default the folder's path, from which the SDK loads the tokenizer.
        keys: keys that are accepted; if empty, any key is, and each is a client of its own.
        models_gib: GiB of memory for all models in training together; None: half of what is free beside the KV
            cache, or half as much as the KV cache if that is more.

    Raises:
        UserError: a folder, a key, an override or the address is wrong.
    """
    recipe = recipe_of_engines(model, [_TURN, *overrides], _REFUSED, ("engine", "trainer"))
    _check_heeded(overrides)
    check_embedded(recipe.engine)
    if wrong := [key for key in keys if not key.startswith(_PREFIX) or not key.isascii() or not key.isprintable()]:
        raise RecipeError([Problem("--key", f"{wrong[0][:8]!r}...", f"the SDK sends keys that begin with {_PREFIX!r}")])
    bound = bind(host, port, ("--host", "--port"))
    torch.set_num_threads(recipe.engine.threads)
    tokens, memory = recipe.trainer.micro_batch_tokens, None if models_gib is None else int(models_gib * 2**30)
    backend = LocalBackend(model, name or str(model.resolve()), recipe.engine, tokens, memory)
    names = HostNames(host, loopback=True) if not keys and is_loopback(bound) else None
    server = TinkerServer(backend, folder, frozenset(keys), names)
    allow_many_connections()
    http = GracefulServer(server.app, server, patience=_PATIENCE_SECONDS)
    bound.listen()  # from here on connections wait instead of being refused
    say_aloud(f"{backend.name}: {backend.architecture}, {backend.parameters:,} parameters, context {backend.context:,}")
    say_aloud(f"models in training: at most {backend.models_bytes / 2**30:.1f} GiB in memory (--models-gib)")
    say_aloud(f"computes with {recipe.engine.threads} of {several(os.cpu_count() or 1, 'core')} (engine.threads)")
    if not keys and not is_loopback(bound):
        say_aloud("warning: other machines may use this server with any key; give --key (docs/how_to/tinker.md)")
    at = url_of(host, bound.getsockname()[1])
    say_aloud(f"export TINKER_BASE_URL={at} TINKER_API_KEY={keys[0] if keys else 'tml-me'}")
    try:
        event_loop.run(run_app(http, [bound], server.run))
    finally:
        server.close()


def _check_heeded(overrides: Sequence[str]) -> None:
    """Raise RecipeError if an override sets a training option that clients set in their requests, or that the server
    does not use."""
    keys = [word.partition("=")[0].strip() for word in overrides]
    told, remedy = "has no meaning for a server", "clients give theirs with each request"
    if problems := [Problem(key, told, remedy) for key in keys if key.startswith("trainer.") and key != _HEEDED]:
        raise RecipeError(problems)
