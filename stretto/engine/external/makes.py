"""The makes of inference servers that stretto can train with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from stretto.engine.external import sglang, vllm
from stretto.engine.external.http import JsonServer
from stretto.engine.external.make import Launcher, Make


@dataclass(frozen=True)
class MakeOfServer:
    """How a make is started, and how it is spoken to; the number is the longest wait for a load in seconds."""

    launch: Launcher
    server: Callable[[JsonServer, float], Make]


MAKES: Mapping[str, MakeOfServer] = {
    "vllm": MakeOfServer(vllm.launch, vllm.VllmServer),
    "sglang": MakeOfServer(sglang.launch, sglang.SglangServer),
}
