"""Settings that packages beside the core read from a recipe: the sections ``[gateway]``, ``[cluster]``, ``[workflow]``
with ``kind = "agent"``, and the outlets of ``[logging]``.
"""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import BaseModel, BeforeValidator, Field, field_validator, model_validator

from stretto.core.errors import nearest
from stretto.doors.door import Door, Section, Texts
from stretto.doors.loading import is_own, with_colon


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
    command: Texts = Field((), description="a program and its arguments; started once for each trajectory")
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


_CLUSTERS = ("auto", "local")


class ClusterConfig(BaseModel, extra="forbid", frozen=True, allow_inf_nan=False):
    """Section ``[cluster]``: where the engines of a run are, and how machines join. The token that machines need to
    join is not part of a recipe: it is the environment variable STRETTO_TOKEN, or generated; join.json in the run
    folder has it."""

    placer: Literal["local", "given", "ray"] = Field(
        "local",
        description="who starts the engines; local: the run, on its own machine; given: you, with `stretto "
        "engine --join`; ray: a Ray cluster",
    )
    listen: str = Field(
        "", description="host:port at which other machines join; empty: none can join; port 0: a free one"
    )
    ray: str = Field("auto", description="address of the Ray cluster; auto: the running one; local: a new one")
    tls: str | None = Field(
        None, description="folder with ca.pem, cert.pem and key.pem for TLS between machines; left out: no TLS"
    )
    trusted_network: bool = Field(
        False,
        description="say that only machines of the run are on the network; ranks on several machines and "
        "weights by broadcast need it, since torch's collectives have neither keys nor encryption",
    )
    gpus: int = Field(0, ge=0, le=64, description="GPUs that Ray reserves for each engine and each rank")
    lease: float = Field(15.0, ge=1.0, description="seconds of silence after which a machine counts as lost")
    lag: float = Field(
        60.0,
        gt=0,
        description="seconds behind the newest version after which an engine gets no new groups until it has loaded it",
    )
    wait: float = Field(600.0, gt=0, description="seconds to wait for the first engine to join")

    @field_validator("ray")
    @classmethod
    def _is_a_cluster(cls, value: str) -> str:
        host, _, port = value.rpartition(":")
        if value in _CLUSTERS or "://" in value or (host and port.isdecimal() and 0 < int(port) < 65_536):
            return value
        near = nearest(value, _CLUSTERS)
        raise ValueError(
            f"{value!r}; allowed: auto, local or HOST:PORT" + (f"; {near}" if near.startswith("did") else "")
        )

    @model_validator(mode="after")
    def _given_engines_can_join(self) -> Self:
        if self.placer == "given" and not self.listen:
            raise ValueError('placer = "given" needs listen = "HOST:PORT": the engines join the run there')
        return self


_TOOLS = "stretto_report.outlets.tools"
#: The door for outlets: classes that satisfy `outlets.follower.Outlet`. Built-in ones have the name of their package.
OUTLETS = Door(
    key="logging.to",
    what="outlet",
    arguments=("about", "cursor"),
    built_in={
        "wandb": f"{_TOOLS}.wandb_run:WandbRun",
        "tensorboard": f"{_TOOLS}.tensorboard_files:TensorboardFiles",
        "mlflow": f"{_TOOLS}.mlflow_run:MlflowRun",
        "trackio": f"{_TOOLS}.trackio_run:TrackioRun",
    },
    section=Section,
)

#: Name of the follower that serves Prometheus.
PROMETHEUS = "prometheus"
_MOST_TAGS = 32


def _listed(value: object) -> object:
    """Convert a TOML list to a tuple without repetitions; a single name becomes a tuple of one. Any other value is
    returned as it is."""
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, list):
        return value
    # Values that cannot be hashed, too: each is refused later, by its place.
    return tuple(one for at, one in enumerate(value) if one not in value[:at])


def _known(name: object) -> object:
    """Return the value as it is. Raises ValueError for a text that names neither a built-in outlet nor a user-defined
    one."""
    tools = OUTLETS.built_in
    if isinstance(name, str) and name not in tools and not is_own(name):
        near = nearest(name, tools)
        near = f"; {near}" if near.startswith("did") else ""
        raise ValueError(f"{name!r} is none of {', '.join(tools)}{near}; {with_colon(name)}")
    return name


Tag = Annotated[str, Field(min_length=1, max_length=64)]


class OutletsConfig(BaseModel, extra="forbid", frozen=True):
    """Tools that show a run, in addition to stretto's own pages (docs/reference/metrics.md).

    Example: ``OutletsConfig(to=("wandb", "tensorboard"), project="arithmetic")``
    """

    to: Annotated[tuple[Annotated[str, OUTLETS, BeforeValidator(_known)], ...], BeforeValidator(_listed)] = Field(
        (), description="tools that receive the metrics; each needs the extra of the same name"
    )
    project: str = Field(
        "stretto",
        pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$",
        max_length=64,
        description="project in W&B and trackio, experiment in MLflow",
    )
    name: str = Field("", max_length=128, description="name of the run in these tools; empty: the name of its folder")
    tags: Annotated[tuple[Tag, ...], BeforeValidator(_listed)] = Field(
        (), max_length=_MOST_TAGS, description="of the run in the tools"
    )
    prometheus_port: int | None = Field(
        None,
        ge=1,
        le=65_535,
        description="port of a page for Prometheus with the newest step's metrics; left out: no page",
    )
    prometheus_host: str = Field(
        "127.0.0.1",
        min_length=1,
        description="address of that page; if it is not loopback, anybody who reaches it can read it",
    )

    @property
    def tools(self) -> tuple[str, ...]:
        """Names of all tools that follow the run, "prometheus" included; empty if there are none."""
        return (*self.to, *((PROMETHEUS,) if self.prometheus_port is not None else ()))
