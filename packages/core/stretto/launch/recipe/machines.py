"""Settings of the section ``[cluster]`` of a recipe."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import BaseModel, Field, field_validator, model_validator

from stretto.core.errors import nearest

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
