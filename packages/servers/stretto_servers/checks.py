"""Checks of running inference servers before a run: release, model, context length, tokenizer and log-probabilities."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from pathlib import Path

from stretto.core.errors import DeadlineExceeded, EngineLost, Problem, RecipeError, StrettoError, WireError
from stretto.engine.config import Capabilities, EngineConfig, release_of
from stretto.launch.preflight.base import digest
from stretto.model.hf.inspection import ModelFolder, read_config
from stretto.model.hf.tokenizer import Tokenizer
from stretto_servers.http import JsonServer
from stretto_servers.make import RAW, Make, Served, make_of, reports_raw

_ANSWER_SECONDS = 5.0
_ITS_OWN = "start it with the policy's own folder"
_PROBES = 32  # texts whose tokens are compared
#: Keys of config.json that do not affect the model's tensors.
_OF_THE_FILE = {"_name_or_path", "transformers_version", "dtype", "torch_dtype", "use_cache", "initializer_range"}
_OF_THE_FILE |= {"bos_token_id", "pad_token_id"}


def check_running_servers(
    config: EngineConfig,
    make: Capabilities,
    base: ModelFolder,
    needed: int,
    tokenizer: Tokenizer,
    prompts: Sequence[Sequence[int]],
    *,
    instead: str,
) -> None:
    """Check every server of `engine.addresses`: its release (a development release passes) and model, whether it
    tokenizes some of the prompts as `tokenizer` does, and, unless `instead` is "", whether its log-probabilities follow
    temperature and filters.

    Args:
        make: capabilities of the make, with its oldest usable release.
        base: the policy's folder.
        needed: context length that the run needs: tokens of the longest prompt with its completion.
        prompts: token ids of the run's prompts.
        instead: what is allowed instead of a server whose log-probabilities ignore temperature and filters; "": it is.

    Raises:
        RecipeError: servers do not answer, are too old, serve another model or a shorter context, tokenize in another
            way, or report log-probabilities of another distribution; names each.
    """
    texts = [tokenizer.decode(prompt) for prompt in prompts[:_PROBES]]
    probe = {text: list(tokenizer.encode(text)) for text in texts}
    if problems := asyncio.run(_asked(config, make, base, needed, probe, instead=instead)):
        raise RecipeError(problems)


async def _asked(
    config: EngineConfig,
    make: Capabilities,
    base: ModelFolder,
    needed: int,
    probe: dict[str, list[int]],
    *,
    instead: str,
) -> list[Problem]:
    asked = (_ask(config.kind, make, address, base, needed, probe, instead=instead) for address in config.addresses)
    found = await asyncio.gather(*asked)
    return [problem for problem in found if problem is not None]


async def _ask(
    kind: str,
    make: Capabilities,
    address: str,
    base: ModelFolder,
    needed: int,
    probe: dict[str, list[int]],
    *,
    instead: str,
) -> Problem | None:
    http = JsonServer(f"the server {address}", address, seconds=_ANSWER_SECONDS, token_seconds=_ANSWER_SECONDS)
    wire = make_of(kind, http, _ANSWER_SECONDS)
    try:
        served = await wire.describe()
        theirs = {text: await _tokens(http, text) for text in probe}
        if (misfit := _misfit(served, make, address, base, needed, probe, theirs)) is not None or not instead:
            return misfit
        return await _raw(wire, address, base, served.context_length or base.context_length, instead)
    except StrettoError as error:
        return Problem("engine.addresses", str(error), f"a server that runs: {make.needed}")
    finally:
        await wire.close()


async def _raw(wire: Make, address: str, base: ModelFolder, context: int, instead: str) -> Problem | None:
    """The problem that a server's log-probabilities ignore temperature and filters, or that it cannot be asked; None
    without one, or if it does not answer. `context`: length in tokens. `instead`: what is allowed instead."""
    with contextlib.suppress(EngineLost, DeadlineExceeded):  # it may be paused; the engine asks again
        try:
            if await reports_raw(wire, base.vocab_size, context):
                return Problem("engine.addresses", f"{address} {RAW}, and others are asked for", instead)
        except WireError as error:
            found = f"{address} does not sample and score as its log-probabilities are checked: {error}"
            return Problem("engine.addresses", found, "start it with the flags of docs/how_to/servers.md")
    return None


def _misfit(
    served: Served,
    make: Capabilities,
    address: str,
    base: ModelFolder,
    needed: int,
    probe: dict[str, list[int]],
    theirs: dict[str, object],
) -> Problem | None:
    """The first fault of what a server says of itself; None without one. `probe`, `theirs`: tokens by text, of the
    policy's tokenizer and of the server's."""
    version = served.release.rpartition(" ")[2]
    if "dev" not in version and release_of(version) < make.oldest:  # a build from source may not know its release
        return Problem("engine.addresses", f"{address} is {served.release}", f"{make.needed} is needed")
    if (different := _difference(served, base)) is not None:
        return Problem("engine.addresses", f"{address} serves {different}", _ITS_OWN)
    if served.context_length is not None and served.context_length < needed:
        found = f"{address} serves {served.model} with a context of {served.context_length} tokens"
        return Problem("engine.addresses", found, f"prompt and completion need {needed}")
    if theirs != probe:
        text = next(text for text in probe if theirs[text] != probe[text])
        found = f"{address} serves {served.model}, whose tokenizer (digest {digest(*theirs.values())}) makes "
        found += f"{theirs[text]} of {text!r}; the policy's (digest {digest(*probe.values())}) makes {probe[text]}"
        return Problem("engine.addresses", found, _ITS_OWN)
    return None


def _difference(served: Served, base: ModelFolder) -> str | None:
    """Describe how the server's model differs from the policy; None if no difference is known. Compared are the keys
    that both config.json have, but for those of the file alone (`_OF_THE_FILE`). Where the server's has no architecture
    or is no local file, the architecture that the server reports is used. Weights of another shape that no key tells
    would fail at the first load."""
    ours, theirs = read_config(base.path), read_config(Path(served.model))
    if served.architecture is not None:
        theirs.setdefault("architectures", [served.architecture])
    keys = sorted((ours.keys() & theirs.keys()) - _OF_THE_FILE)
    if not (other := [key for key in keys if ours[key] != theirs[key]]):
        return None
    digests = [digest(*(f"{key}={config[key]}" for key in keys)) for config in (theirs, ours)]
    found = ", ".join(f"{key} {theirs[key]} in place of {ours[key]}" for key in other)
    return f"{served.model} (digest {digests[0]}), which is not the policy {base.path} (digest {digests[1]}): {found}"


async def _tokens(http: JsonServer, text: str) -> object:
    # Without the field `model`, because the server may call its model by another name than its path.
    reply = await http.exchange("POST", "/tokenize", {"prompt": text})
    return reply.get("tokens") if isinstance(reply, dict) else reply
