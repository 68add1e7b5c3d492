"""Settings of the gateway and of agents: the sections ``[gateway]``, and ``[workflow]`` with ``kind = "agent"``."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, Field

#: A list of texts in TOML, a tuple in Python.
Words = Annotated[tuple[str, ...], BeforeValidator(lambda value: tuple(value) if isinstance(value, list) else value)]


class GatewayConfig(BaseModel, extra="forbid", frozen=True, allow_inf_nan=False):
    """Section ``[gateway]`` of a recipe: address at which agents reach the policy, and limits.

    Example: ``GatewayConfig(turns=200)``
    """

    host: str = Field(
        "127.0.0.1",
        description="address to listen on; addresses other than loopback need a key in the environment "
        "variable STRETTO_API_KEY",
    )
    port: int = Field(0, ge=0, le=65_535, description="port to listen on; 0: a free one, which `stretto inspect` shows")
    turns: int = Field(1024, ge=1, description="most turns of one session")
    turn_seconds: float = Field(600.0, gt=0, description="longest wait for one turn, in seconds")
    body_bytes: int = Field(16 << 20, ge=1024, description="largest request body, in bytes")


class AgentConfig(BaseModel, extra="forbid", frozen=True, allow_inf_nan=False):
    """Section ``[workflow]`` of a recipe with ``kind = "agent"``: any program that reaches the policy through the base
    URL of its client. Without `command` and `function`, external services open the sessions over HTTP."""

    kind: Literal["agent"] = Field(description="programs that speak HTTP make the trajectories")
    command: Words = Field((), description="a program and its arguments; started once for each trajectory")
    function: str | None = Field(
        None,
        description="'package.module:function', called with the task in a process of its own, in place of a command",
    )
    path: str | None = Field(
        None,
        description="folder in which it runs; left out: the recipe's folder if a function's module, or a file that the "
        "command names, is there",
    )
    model: str = Field("policy", min_length=1, description="model name that agents use in requests")
    parallel: int = Field(16, ge=1, le=4096, description="agents that run at once")
    deadline: float = Field(600.0, gt=0, le=24 * 3600, description="seconds for one trajectory")
    max_failed: float = Field(
        0.5, gt=0, le=1, description="share of the last 64 trajectories that may fail before the run ends"
    )
