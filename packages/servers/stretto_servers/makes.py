"""Loading of the class of a make of inference server, by `engine.kind`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import replace

from stretto.engine.capabilities import Capabilities
from stretto.engine.config import MAKES, EngineConfig
from stretto_servers.http import JsonServer
from stretto_servers.make import Launch, Make, Room

_METHODS = [name for name, one in vars(Make).items() if inspect.isfunction(one) and not name.startswith("_")]


def make_of(kind: str, http: JsonServer, load_seconds: float) -> Make:
    """Make the client of a server of this kind. `load_seconds`: longest wait for a load."""
    make: Make = MAKES.load(kind)(http, load_seconds)
    return make


def launch_of(config: EngineConfig, model: str, port: int, room: Room | None = None) -> Launch:
    """Command and environment that start a server of `config.kind` on a port. `room`: its memory on the GPUs, passed by
    flags from the class's `flags_of_room`, unless `engine.arguments` have these flags."""
    make = MAKES.load(config.kind)
    launch: Launch = getattr(make, "launch")(config, model, port)  # noqa: B009  # of the class
    told = {word.partition("=")[0] for word in config.arguments}
    if room is None or config.on_cpu or (flags_of := getattr(make, "flags_of_room", None)) is None:
        return launch
    flags: dict[str, str] = flags_of(config, model, room)
    words = [word for name, value in flags.items() if name not in told for word in (name, value)]
    return replace(launch, command=(*launch.command, *words))


def make_faults(config: EngineConfig, model: str) -> Iterator[str]:
    """Check the class of `engine.kind` without starting a server; yields a description of each fault."""
    make = MAKES.load(config.kind)
    if lacking := [name for name in (*_METHODS, "launch") if not callable(getattr(make, name, None))]:
        yield f"has no method {', '.join(lacking)} (docs/how_to/doors/engine.md)"
    for name in _METHODS:
        method = getattr(make, name, None)
        if callable(method) and (differs := _differs(name, method)):
            yield f"has a method {name!r} that {differs}"
    if not isinstance(getattr(make, "capabilities", None), Capabilities):
        yield "has no capabilities, which are a Capabilities of stretto.engine.capabilities"
    elif not lacking and not config.addresses and not isinstance(launch_of(config, model, 1), Launch):
        yield "launch(config, model, port) returned no Launch"


def _differs(name: str, method: Callable[..., object]) -> str:
    """Describe how a method's signature differs from that of `Make`; "" if it fits."""
    wanted: Callable[..., object] = getattr(Make, name)
    parameters = inspect.signature(wanted).parameters.values()
    by_place = [one.name for one in parameters if one.kind is one.POSITIONAL_OR_KEYWORD]
    by_name = {one.name: None for one in parameters if one.kind is one.KEYWORD_ONLY}
    try:
        inspect.signature(method).bind(*by_place, **by_name)
    except TypeError as error:
        return f"is called otherwise: {error}"
    if inspect.iscoroutinefunction(wanted) and not inspect.iscoroutinefunction(method):
        return "is not asynchronous"
    streams = inspect.isasyncgenfunction(method) or name != "stream"
    return "" if streams else "yields nothing: an asynchronous generator is needed"
