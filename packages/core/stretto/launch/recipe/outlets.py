"""Settings of ``[logging]`` for *outlets*: tools that show a run, such as W&B, beside stretto's own pages."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, BeforeValidator, Field

from stretto.core.errors import nearest
from stretto.doors.door import Door, Section
from stretto.doors.loading import is_own, with_colon

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
    """Convert a TOML list to a tuple without repetitions; a single name becomes a tuple of one."""
    if isinstance(value, str):
        return (value,)
    return tuple(dict.fromkeys(value)) if isinstance(value, list) else value


def _known(name: object) -> object:
    tools = OUTLETS.built_in
    if isinstance(name, str) and name not in tools and not is_own(name):
        raise ValueError(f"{name!r} is none of {', '.join(tools)}; {with_colon(name) or nearest(name, tools)}")
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
        """Names of all tools that follow the run, Prometheus included."""
        return (*self.to, *((PROMETHEUS,) if self.prometheus_port is not None else ()))


def stem(tool: str) -> str:
    """Return the name of a tool for its files and its process: without a colon.

    >>> stem("my_tools:Tool")
    'my_tools.Tool'
    """
    return tool.replace(":", ".")


def destinations(config: OutletsConfig, run: Path, environment: Mapping[str, str]) -> list[str]:
    """Return a sentence for each tool that says where the run in the folder `run` is shown. `environment`: environment
    variables, in which tools have their settings.

    >>> destinations(OutletsConfig(to="tensorboard", prometheus_port=9400), Path("runs/first"), {})
    ['shown in tensorboard: files in runs/first/tensorboard; tensorboard --logdir runs', \
'shown in prometheus: http://127.0.0.1:9400/metrics']
    """
    return [f"shown in {tool}: {_destination(tool, config, run, environment)}" for tool in config.tools]


def _destination(tool: str, config: OutletsConfig, run: Path, environment: Mapping[str, str]) -> str:
    match tool:
        case "wandb" if environment.get("WANDB_MODE") in ("offline", "dryrun"):
            return f"files in {run}/wandb; wandb sync {run}/wandb/offline-run-*"
        case "wandb":
            return f"project {config.project} at {environment.get('WANDB_BASE_URL', 'the address of its own settings')}"
        case "tensorboard":
            return f"files in {run}/tensorboard; tensorboard --logdir {run.parent}"
        case "mlflow":
            where = environment.get("MLFLOW_TRACKING_URI", f"a database in {Path.cwd()}")
            return f"experiment {config.project} at {where}"
        case "trackio":
            names = ("TRACKIO_SERVER_URL", "TRACKIO_SPACE_ID", "TRACKIO_DIR")
            where = next((environment[name] for name in names if environment.get(name)), "its own folder")
            return f"project {config.project} at {where}"
        case _ if is_own(tool):
            return f"as {tool} does, project {config.project}"
    host = f"[{config.prometheus_host}]" if ":" in config.prometheus_host else config.prometheus_host
    return f"http://{host}:{config.prometheus_port}/metrics"
