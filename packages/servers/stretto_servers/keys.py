"""Checks of the section ``[engine]`` for a server of another make: keys, addresses, interpreter, head size."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import replace

from transformers import AutoConfig

from stretto.core.errors import Problem, RecipeError
from stretto.engine.config import Capabilities, EngineConfig, capabilities_of, release_of
from stretto.launch.recipe.recipe import Recipe
from stretto.model.hf.inspection import ModelFolder
from stretto.model.hf.tokenizer import Tokenizer
from stretto.processes.http.reach import names_loopback
from stretto_servers.checks import check_running_servers
from stretto_servers.make import NOT_RAW, NOT_RAW_OR_PLAIN, is_shaped
from stretto_servers.staging import window_lacking

_ADDRESS = re.compile(r"(?:[A-Za-z0-9._-]+|\[[0-9A-Fa-f:]+\]):[0-9]{1,5}")
_LARGEST_PORT = 65_535
_ANOTHER = 'another engine.kind, such as "native"'
_ASK_SECONDS = 30.0  # timeout for an interpreter that prints a version
_VERSION = """
import importlib.metadata, sys
for name in sys.argv[1:]:
    try:
        print(importlib.metadata.version(name))
        break
    except importlib.metadata.PackageNotFoundError:
        pass
"""


def check_keys(recipe: Recipe, here: bool) -> None:
    """Check that the recipe's make of engine (`engine.kind`) supports all of its settings. `here`: also check that the
    interpreter `engine.python` has the make installed, in a supported version.

    Raises:
        RecipeError: a check fails; names every problem.
    """
    config, make = recipe.engine, make_of_recipe(recipe)
    if problems := [*_keys(recipe, make), *(_interpreter(config, make) if here else ())]:
        raise RecipeError(problems)


def make_of_recipe(recipe: Recipe) -> Capabilities:
    """Capabilities of the recipe's kind of engine. Their `oldest` is the oldest release that the recipe can use, which
    is later with `weights.medium` "broadcast"."""
    make = capabilities_of(recipe.engine.kind)
    return replace(make, oldest=max(make.oldest, make.broadcast)) if recipe.weights.medium == "broadcast" else make


def _keys(recipe: Recipe, make: Capabilities) -> Iterator[Problem]:
    config, sampling = recipe.engine, recipe.sampling
    if config.python is None and not config.addresses and make.packages:
        remedy = f"name the interpreter of an environment that has {make.needed}, or give engine.addresses"
        yield Problem("engine.python", f'missing, and engine.kind is "{config.kind}"', remedy)
    if config.addresses:
        for key in ("python", "arguments"):
            if getattr(config, key):
                found = "is given beside engine.addresses, whose servers run already"
                yield Problem(f"engine.{key}", found, "give one of both")
        elsewhere = recipe.cluster.placer != "local" or (recipe.cluster.listen and not recipe.trainer.remote_ranks)
        if elsewhere:
            found = "is given, and machines would join with engines of their own ([cluster])"
            yield Problem("engine.addresses", found, "leave out [cluster], or engine.addresses and give engine.python")
    yield from _addresses(config)
    if recipe.weights.medium == "broadcast" and not recipe.cluster.trusted_network:
        for address in (one for one in config.addresses if not names_loopback(one.rpartition(":")[0].strip("[]"))):
            found = f"false, and weights go to {address} by a collective, which knows neither key nor encryption"
            remedy = "true says that nobody else is on their network (docs/how_to/cluster.md)"
            yield Problem("cluster.trusted_network", found, remedy)
    if recipe.weights.medium == "broadcast" and not config.addresses and not config.on_cpu:
        found = (
            f'"broadcast" to servers on GPUs that stretto starts: NCCL refuses two ranks, {make.name} and its sender, '
        )
        yield Problem("weights.medium", f"{found}on one GPU", '"auto": they map the trainer\'s file')
    if config.batching == "rounds":
        found = f'"rounds", and {make.name} does not compute the same completion twice bit for bit'
        yield Problem("engine.batching", found, '"auto", or engine.kind = "native" for a run that can be repeated')
    if recipe.trainer.lora is not None:
        found = f"is given: adapters alone are published then, and {make.name} is given whole models"
        yield Problem("trainer.lora", found, 'train all parameters, or choose engine.kind = "native"')
    if not make.filtered_logprobs:
        for key, off in (("top_p", 1.0), ("top_k", 0), ("min_p", 0.0)):
            if getattr(sampling, key) != off:
                found = f"{getattr(sampling, key)}, and the log-probabilities of {make.name} do not follow it"
                yield Problem(f"sampling.{key}", found, f"{off:g}, or another engine.kind")


def _addresses(config: EngineConfig) -> Iterator[Problem]:
    for address in config.addresses:
        if not _ADDRESS.fullmatch(address) or not 0 < int(address.rpartition(":")[2]) <= _LARGEST_PORT:
            yield Problem("engine.addresses", repr(address), 'host:port is needed, as in "127.0.0.1:8000"')
    if again := [address for address in dict.fromkeys(config.addresses) if config.addresses.count(address) > 1]:
        yield Problem("engine.addresses", f"{again[0]} is given twice", "each server is one engine")
    if config.addresses and config.count != len(config.addresses):
        found = f"{config.count}, and engine.addresses has {len(config.addresses)}"
        yield Problem("engine.count", found, "leave it out: each address is one engine")


def _interpreter(config: EngineConfig, make: Capabilities) -> Iterator[Problem]:
    python = config.python
    if python is None or config.addresses or not make.packages:
        return
    if not (os.path.isfile(python) and os.access(python, os.X_OK)):
        remedy = f"the interpreter of an environment that has {make.needed}, as in /home/me/{config.kind}/bin/python"
        yield Problem("engine.python", f"{python} is no program", remedy)
        return
    command = [python, "-I", "-c", _VERSION, *make.packages]
    try:
        asked = subprocess.run(
            command, capture_output=True, encoding="utf-8", errors="replace", timeout=_ASK_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        yield Problem("engine.python", f"{python} does not run: {error}", "an interpreter is needed")
        return
    found = asked.stdout.strip()
    if asked.returncode:
        said = (asked.stderr.strip().splitlines() or [f"exit code {asked.returncode}"])[-1]
        yield Problem("engine.python", f"{python} is no working interpreter: {said}", f"it needs {make.needed}")
    elif not found:
        remedy = f"install {make.needed} into it: {python} -m pip install '{make.packages[0]}'"
        yield Problem("engine.python", f"{python} does not have {make.name}", remedy)
    elif release_of(found) < make.oldest:
        yield Problem("engine.python", f"{python} has {make.name} {found}", f"{make.needed} is needed")


def check_model(recipe: Recipe, base: ModelFolder) -> None:
    """Check that the recipe's make of server computes the model in the folder `base` as transformers does, so far as
    the config shows it (`check_window` has the rest), and that a CPU server on this machine has an attention kernel for
    its head size. Passes for the native engine.

    Raises:
        RecipeError: the server skips the model's output matrix, or has no such kernel.
    """
    if recipe.engine.kind != "native":
        place = "model.build.head_dim" if recipe.model.build is not None else ""
        check_engine(recipe.engine, base, place, here=recipe.cluster.placer == "local")


def check_engine(config: EngineConfig, base: ModelFolder, place: str = "", *, here: bool = True) -> None:
    """Check a model as `check_model` does, without a recipe, for an engine that is not native. `place`: key of the head
    size, for messages; "": the folder's. `here`: the server runs on this machine. Raises RecipeError as `check_model`
    does."""
    make = capabilities_of(config.kind)
    heads = _head_dim(config, base, make, place or f"{base.path}: head_dim") if here else ()
    if problems := [*heads, *_untied_head(base, make)]:
        raise RecipeError(problems)


def _head_dim(config: EngineConfig, base: ModelFolder, make: Capabilities, place: str) -> Iterator[Problem]:
    if config.addresses or not config.on_cpu:
        return
    if make.cpu_head_dims and base.head_dim not in make.cpu_head_dims:
        allowed = ", ".join(map(str, make.cpu_head_dims))
        found = f"{base.head_dim}, for which {make.name} has no attention on a processor"
        yield Problem(place, found, f"allowed: {allowed}")


def _untied_head(base: ModelFolder, make: Capabilities) -> Iterator[Problem]:
    config = AutoConfig.from_pretrained(base.path, local_files_only=True)
    text = config.get_text_config()
    if text.model_type not in make.without_head:
        return
    if not all(getattr(one, "tie_word_embeddings", True) for one in (config, text)):
        found = f"false, and {make.name} takes the output matrix of {text.model_type!r} from the embedding"
        yield Problem(f"{base.path}: tie_word_embeddings", found, f"allowed: true; or {_ANOTHER}")


def check_window(recipe: Recipe, base: ModelFolder, longest: int) -> None:
    """Check that the recipe's make of server computes the model's sliding window, or that no sequence is longer.
    Passes for the native engine.

    Args:
        longest: tokens of the longest sequence: prompt and completion.

    Raises:
        RecipeError: the server computes full attention, and a sequence is longer than the window.
    """
    if recipe.engine.kind == "native":
        return
    make, window = capabilities_of(recipe.engine.kind), window_lacking(recipe.engine.kind, base.path)
    if window is not None and window < longest:
        kind = AutoConfig.from_pretrained(base.path, local_files_only=True).get_text_config().model_type
        found = f"{window}, and {make.name} computes {kind!r} without it; sequences have up to {longest} tokens"
        remedy = f"allowed: sequences of up to {window} tokens (sampling.max_tokens, shorter prompts); or {_ANOTHER}"
        raise RecipeError([Problem(f"{base.path}: sliding_window", found, remedy)])


def check_servers(
    recipe: Recipe,
    base: ModelFolder,
    tokenizer: Tokenizer,
    prompts: Sequence[Sequence[int]],
    shaped: bool | None = None,
) -> None:
    """Check every server of `engine.addresses`: request its model, its tokens of some of the prompts, and a
    sample. Passes without addresses. `base`: the policy's folder. `prompts`: token ids of each. `shaped`: whether
    log-probabilities under a temperature or filters are used; None: if the recipe has one.

    Raises:
        RecipeError: the errors of `check_running_servers`.
    """
    if recipe.engine.addresses:
        needed = min(base.context_length, max(map(len, prompts)) + recipe.sampling.max_tokens)
        instead = NOT_RAW if shaped else ""
        if shaped is None and is_shaped(recipe.sampling.record(())):
            instead = NOT_RAW_OR_PLAIN
        make = make_of_recipe(recipe)
        check_running_servers(recipe.engine, make, base, needed, tokenizer, prompts, instead=instead)
