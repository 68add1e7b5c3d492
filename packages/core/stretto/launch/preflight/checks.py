"""Checks before any process starts: lengths, models, ranks, adapters, checkpoints, devices, ports, the reward."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import socket
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch

from stretto.core.errors import (
    ModelFolderError,
    Problem,
    RecipeError,
    RewardFunctionError,
    RoleError,
    RunFolderError,
    StoreError,
    nearest,
    several,
)
from stretto.core.machine import gpus, unusable
from stretto.doors.loading import check_packages, from_package, is_own
from stretto.engine.config import MAKES, EngineConfig
from stretto.engine.native.generation import MOST_WAITING
from stretto.engine.native.scheduler import longest_row_of
from stretto.launch.recipe.extensions import OUTLETS, OutletsConfig
from stretto.launch.recipe.recipe import Recipe
from stretto.model.attention_support import refuse_unsupported, refuse_untrainable
from stretto.model.families import check_family
from stretto.model.hf.folder import ModelFolder, inspect_model_folder
from stretto.model.hf.layers import decoder_layers, linear_layers
from stretto.model.hf.skeleton import check_fit, skeleton
from stretto.model.hf.tokenizer import Tokenizer, load_tokenizer
from stretto.processes.http.reach import bind, unreachable
from stretto.rewards.built_in import BUILT_IN
from stretto.rewards.config import RewardsConfig
from stretto.rewards.service.judging import PLACE, load_reward
from stretto.rewards.service.pool import check_reward
from stretto.rollout.config import RolloutConfig
from stretto.trainer import checkpoint
from stretto.trainer.adapters import adapt
from stretto.trainer.config import OptimizerConfig, SupervisedConfig, TrainerConfig
from stretto.weights.config import ChosenMedium, Route, choose

#: Environment variable with GPUs for `--dry-run` to assume, as COUNTxGIB or COUNTxGIB@DRIVER: "8x80", "2x80,1x24".
ASSUMED = "STRETTO_GPUS"
_LARGEST_PORT = 65_535


def longest_prompt_allowed(recipe: Recipe, base: ModelFolder) -> int:
    """Return the length in tokens of the longest prompt that leaves room for ``sampling.max_tokens``.

    Raises:
        ModelFolderError: ``sampling.max_tokens`` leave no room in the model's context.
        RecipeError: they leave none in the engine's KV cache.
    """
    completion = recipe.sampling.max_tokens
    if completion >= base.context_length:
        found = f"sampling.max_tokens = {completion}, and the model's context has {base.context_length} tokens"
        raise ModelFolderError([Problem(str(base.path), found, "choose fewer tokens or a longer context")])
    longest = longest_row_of(base, recipe.engine)
    if completion >= longest:
        found = f"{recipe.engine.cache_gib:g} holds {longest} tokens, and sampling.max_tokens = {completion}"
        raise RecipeError([Problem("engine.cache_gib", found, "choose fewer tokens, or more memory for the KV cache")])
    return min(base.context_length, longest) - completion


def given_to_servers(config: EngineConfig) -> list[str]:
    """List the keys that are given in ``[engine]`` and that only servers such as vLLM have; empty if none is."""
    return [key for key in ("python", "arguments", "addresses") if getattr(config, key)]


def check_engine_keys(recipe: Recipe, *, here: bool = True) -> None:
    """Check that the recipe's make of engine (`engine.kind`) supports all of its settings. `here`: also check that the
    interpreter `engine.python` has the make installed, in a supported version. Raises RecipeError if a check fails;
    names every problem."""
    if recipe.engine.kind == "native" and (given := given_to_servers(recipe.engine)):
        remedy = 'only engine.kind = "vllm" or "sglang" has it'
        raise RecipeError(Problem(f"engine.{key}", 'is given, and engine.kind is "native"', remedy) for key in given)
    check_of_servers("check_keys", recipe, here)


def check_of_servers(name: str, recipe: Recipe, *arguments: object) -> None:
    """Call the check `name` of `stretto_servers.keys` with the recipe and `arguments`; do nothing for native engines.
    Raises RecipeError if the check fails, or the package is missing."""
    if recipe.engine.kind != "native":
        from_package(f"stretto_servers.keys:{name}", MAKES.key)(recipe, *arguments)


def check_top_k(recipe: Recipe, base: ModelFolder) -> None:
    """Raise ModelFolderError if ``sampling.top_k`` is more than the number of tokens in the model's vocabulary."""
    if recipe.sampling.top_k > base.vocab_size:
        found = f"sampling.top_k = {recipe.sampling.top_k}, and the model's vocabulary has {base.vocab_size} tokens"
        raise ModelFolderError([Problem(str(base.path), found, "choose fewer, or 0 for all")])


def check_vocabulary(reference: str, tokenizer: Tokenizer, key: str) -> ModelFolder:
    """Check that the model in the folder `reference` has the vocabulary of `tokenizer`; returns its facts. `key`:
    recipe key that names the folder. Raises ModelFolderError if the model cannot be loaded, is not supported, or has
    another vocabulary."""
    folder = inspect_model_folder(reference, key)
    check_kind(folder)
    other = load_tokenizer(folder.path)
    if other.vocabulary != tokenizer.vocabulary:
        found = f"its vocabulary ({len(other.vocabulary)} tokens) is not the policy's ({len(tokenizer.vocabulary)})"
        remedy = f"{key} needs a model with the policy's tokenizer; without {key} the first policy is the reference"
        raise ModelFolderError([Problem(reference, found, remedy)])
    return folder


def check_reward_function(config: RewardsConfig) -> tuple[str, ...] | None:
    """Check that the rewards can be loaded, in a process that can be killed: a user's module may hang or exit, and a
    built-in reward with settings may depend on the machine. Other built-in rewards are not loaded.
    Returns the names of the further fields of a row that the user's rewards take; None: all.

    Raises:
        RewardFunctionError: a reward cannot be loaded.
        RoleError: the process cannot be started, for lack of memory or file descriptors.
    """
    if all(part.function in BUILT_IN and not BUILT_IN[part.function].configured for part in config.parts):
        return ()
    for part in config.parts:
        if ":" not in part.function and part.function not in BUILT_IN:
            load_reward(part.function)
    try:
        return asyncio.run(check_reward(config))
    except RoleError as error:
        if isinstance(error.__cause__, OSError):  # the machine lacks resources: not the user's mistake
            raise
        raise RewardFunctionError([Problem(PLACE, str(error), "its module must be importable")]) from None


def check_reward_addresses(config: RewardsConfig) -> None:
    """Check that the server of every reward with an address accepts connections. Raises RewardFunctionError if a server
    does not; names each of them."""
    faults = {name: (section.address, unreachable(section.address)) for name, section in config.asked.items()}
    if dead := {name: told for name, told in faults.items() if told[1]}:
        remedy = "start the server, or give the address of one that runs"
        raise RewardFunctionError(
            Problem(f"rewards.{name}.address: {address!r}", f"nothing answers: {fault}", remedy)
            for name, (address, fault) in dead.items()
        )


def check_reward_sources(config: RewardsConfig, sources: Iterable[str]) -> None:
    """Check the sources that rewards name against `sources`, the names of the questions' sources ("": of questions from
    a source without a name). Raises RewardFunctionError if a reward names an unknown source, or a source has no
    reward."""
    known, problems = set(sources), []
    named = known - {""} or {"none: the task has no sources with names"}
    for number, part in enumerate(config.functions):
        place = f"rewards.functions.{number}.sources"
        unknown = [name for name in part.sources if name not in known]
        problems += [Problem(place, f"no source is called {name!r}", nearest(name, named)) for name in unknown]
    everywhere = any(not part.sources for part in config.parts)
    judged = {name for part in config.parts for name in part.sources}
    if not everywhere and (without := sorted(known - judged)):
        found = f"none judges the completions of {f'source {without[0]!r}' if without[0] else 'the task'}"
        problems.append(Problem("rewards.functions", found, "name it in the sources of one, or give one without any"))
    if problems:
        raise RewardFunctionError(problems)


def check_machine(recipe: Recipe, *, dry: bool = False) -> None:
    """Check ports, logging tools and devices of this machine; other machines are checked when they join. `dry`: do not
    check devices if the environment variable ``STRETTO_GPUS`` names GPUs. Raises RecipeError if a check fails."""
    check_ports(recipe)
    check_logging(recipe.logging)
    engine = recipe.engine if recipe.local_engines else None
    if not (dry and os.environ.get(ASSUMED)):
        check_devices({"engine": engine, "trainer": recipe.trainer, "warm_start": recipe.warm_start})


def check_ports(recipe: Recipe) -> None:
    """Check the ports of this machine on which engines will listen; does nothing for engines on Unix sockets or on
    other machines. Raises RecipeError if a port is in use, or its number is above 65,535."""
    config = recipe.engine
    if config.transport == "unix" or not recipe.local_engines:  # engines elsewhere take free ports of their machines
        return
    ports = range(config.base_port, config.base_port + config.count)
    if ports[-1] > _LARGEST_PORT:
        found = f"{config.base_port}, and {several(config.count, 'engine')} need {config.count} ports from there"
        raise RecipeError([Problem("engine.base_port", found, f"ports end at {_LARGEST_PORT}")])
    taken = [port for port in ports if not is_free(port)]
    if taken:
        raise RecipeError(Problem("engine.base_port", f"port {port} is in use", "choose free ports") for port in taken)


def check_logging(config: OutletsConfig) -> None:
    """Check that the built-in tools of ``[logging]`` are installed; user-defined ones are not tried here. Raises
    RecipeError if a tool or `stretto_report` is not installed, or the port for Prometheus is in use."""
    if config.tools:
        check_packages(OUTLETS.key, "stretto_report")
    problems = [
        Problem("logging.to", f"{tool!r} is not installed", f"pip install 'stretto[{tool}]'")
        for tool in config.to
        if not is_own(tool) and not is_installed(tool)
    ]
    if (port := config.prometheus_port) is not None:
        try:
            bind(config.prometheus_host, port, ("logging.prometheus_host", "logging.prometheus_port")).close()
        except RecipeError as error:
            problems += error.problems
    if problems:
        raise RecipeError(problems)


def is_installed(package: str) -> bool:
    """Whether a top-level package is installed; it is not imported. A folder of its name without code, such as the
    ``wandb/`` that W&B writes, does not count."""
    found = importlib.util.find_spec(package)
    return found is not None and found.origin is not None


def check_cluster(recipe: Recipe) -> None:
    """Check the settings by which other machines join the run; does nothing for a run on this machine alone.

    Raises:
        RecipeError: Ray is missing or does not answer; the run needs ranks on other machines and no port is given; the
            port or a TLS file is invalid; or collectives would cross a network that is not declared as trusted. The
            error has every such problem. Or the packages of the application or the cluster are missing.
    """
    if recipe.has_machines:
        from_package("stretto_app.extensions.joining:check_cluster", "cluster", "stretto_cluster")(recipe)


def check_ray(recipe: Recipe) -> None:
    """Check that the Ray cluster that will start the engines can be reached and is large enough; does nothing if the
    recipe has no Ray. Raises RecipeError if it cannot be reached, or has too few CPUs, GPUs or machines for the engines
    and ranks of the run."""
    if recipe.cluster.placer == "ray":
        from_package("stretto_app.extensions.joining:check_ray", "cluster.placer", "stretto_cluster")(recipe)


def check_in_flight(config: RolloutConfig) -> None:
    """Check that all completions in flight fit into the queue of one engine: while others are replaced, it may be the
    only one. A full queue would look like a lost engine. Raises RecipeError if there are more completions than an
    engine queues."""
    _, groups = config.in_flight_bounds
    if (completions := groups * config.group_size) > MOST_WAITING:
        key = "rollout.max_in_flight_max" if config.max_in_flight == "auto" else "rollout.max_in_flight"
        found = f"{several(groups, 'group')} of {config.group_size:,} (group_size) are {completions:,} completions"
        raise RecipeError([Problem(key, found, f"an engine queues at most {MOST_WAITING:,}")])


def check_devices(sections: Mapping[str, EngineConfig | OptimizerConfig | None]) -> None:
    """Check that torch can use a GPU if a section has ``device = "cuda"``; else do nothing. `sections`: by name, for
    messages; None: not in the recipe. Raises RecipeError if torch cannot use a GPU; names each section that asks for
    one."""
    wanted = [name for name, section in sections.items() if section is not None and section.device == "cuda"]
    if wanted and not torch.cuda.is_available():
        why = f" ({unusable(there, torch.version.cuda)})" if (there := gpus()) else ""
        found, remedy = f"'cuda', and torch finds no GPU that it can use{why}", "'auto' takes a GPU if there is one"
        raise RecipeError(Problem(f"{name}.device", found, remedy) for name in wanted)


def check_kind(base: ModelFolder) -> None:
    """Check by the model's config that engine and trainer support its architecture. Raises ModelFolderError if they do
    not."""
    config = check_fit(base)
    refuse_unsupported(config)
    refuse_untrainable(config)
    check_family(config)


def is_free(port: int) -> bool:
    """Whether a server can listen on this port of the loopback interface now."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def medium_of(recipe: Recipe) -> ChosenMedium:
    """Choose how weights get from the trainer to the engines of a run; returns the medium with the reason. Raises
    RecipeError if the recipe asks for a medium that cannot reach its engines (`weights.config.choose`)."""
    elsewhere = recipe.cluster.placer != "local" or bool(recipe.cluster.listen)
    return choose(recipe.weights, Route(engines=recipe.engine.kind, elsewhere=elsewhere))


def check_trainable(config: TrainerConfig, model: Path, gpus: int) -> None:
    """Check ranks and adapters of the trainer. `model`: its folder; `gpus`: number of GPUs of this machine, 0: do not
    compare. Raises RecipeError if there are more ranks than GPUs, the ranks cannot divide the model, adapters name
    layers that the model does not have, or several ranks need `stretto_cluster`, which is not installed."""
    if config.ranks > 1:
        check_packages("trainer.ranks", "stretto_cluster")
    if problems := list(too_many_ranks(config, gpus)):
        raise RecipeError(problems)
    check_dividable(config, model)
    if config.lora is None or not config.lora.target_modules:
        return
    there = {name.rsplit(".", 1)[-1] for name in linear_layers(skeleton(model))}
    missing = [name for name in config.lora.target_modules if name not in there]
    if missing:
        place = "trainer.lora.target_modules"
        raise RecipeError(
            Problem(place, f"{name!r} is no linear layer of the model's decoder", nearest(name, there))
            for name in missing
        )


def check_muon(config: SupervisedConfig, model: Path) -> None:
    """Check that Muon, if it is chosen, gets all matrices in the layers of the model in the folder `model`: it trains
    those of linear layers alone. Raises RecipeError, with the name of the first other one, such as merged experts."""
    if config.optimizer != "muon":
        return
    bare = skeleton(model)
    inside = {id(one) for layer in decoder_layers(bare) for one in layer.parameters()}
    inside -= {id(layer.weight) for layer in linear_layers(bare).values()}
    if others := [name for name, one in bare.named_parameters() if id(one) in inside and one.ndim > 1]:
        found = f"'muon', and {others[0]} is no matrix of a linear layer: Muon would not train it"
        raise RecipeError([Problem("warm_start.optimizer", found, '"adamw" trains all parameters')])


def check_dividable(config: TrainerConfig, model: Path, key: str = "") -> None:
    """Check that the ranks can divide the matrices and heads of the model in the folder `model`. Does nothing without
    tensor and context parallelism. `key`: recipe key that names the folder, for messages; "" for the policy. Raises
    RecipeError if they cannot."""
    if config.shares == config.ranks:
        return
    refuse_undividable = from_package("stretto_cluster.ranks.matrices:refuse_undividable", "trainer.ranks")
    try:
        refuse_undividable(skeleton(model), config.tensor_parallel, config.context_parallel)
    except RecipeError as error:
        of = f" of {key}" if key else ""
        raise RecipeError(Problem(one.place, one.found + of, one.remedy) for one in error.problems) from None


def too_many_ranks(config: TrainerConfig, there: int) -> Iterator[Problem]:
    """Yield one problem if there are more ranks on this machine than GPUs. `there`: number of GPUs; 0: none known, no
    problem."""
    if config.device != "cpu" and 0 < there < config.local_ranks:
        here = f", {config.local_ranks} of them on this machine" if config.remote_ranks else ""
        found = f"{config.ranks}{here}, and the machine has {there} GPUs, one for each rank"
        most = there // config.together * config.together  # ranks that divide a share are of one machine
        fewer = f"trainer.remote_ranks = {config.ranks - most}" if config.remote_ranks else f"at most {most}"
        if not most:
            fewer = f"trainer.tensor_parallel * trainer.context_parallel of at most {there}"
        yield Problem("trainer.ranks", found, f'{fewer}, or trainer.device = "cpu"')


def check_checkpoint(folder: Path, config: TrainerConfig, model: Path) -> None:
    """Check that a trainer of this model can resume from the checkpoint in `folder`, by names and shapes only. `model`:
    folder of version 0 of the policy. Raises RunFolderError if the checkpoint is incomplete, or belongs to another
    model or to other adapters."""
    policy = skeleton(model)
    if config.lora is not None:
        adapt(policy, config.lora)
    try:
        checkpoint.check(folder, policy)
    except StoreError as error:
        remedy = "resume with the model and the adapters that it was written with"
        raise RunFolderError([Problem(str(folder), str(error), remedy)]) from error
