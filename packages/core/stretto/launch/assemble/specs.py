"""The specs of a run's roles (the settings that a process gets at its start), and the endpoints that roles share."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from pathlib import Path

from stretto.core.canary import text as canary_text
from stretto.core.machine import Seat
from stretto.engine.config import EngineConfig
from stretto.engine.wire import EngineSpec
from stretto.launch.preflight.devices import seat_of_engine
from stretto.launch.preflight.plan import Plan
from stretto.launch.recipe.recipe import Recipe
from stretto.model.hf.inspection import inspect_model_folder
from stretto.store.config import TokensConfig
from stretto.trainer.messages import Evidence, TokensSpec, TrainerSpec

#: Names of files in the folder of a run's sockets.
CONTROL, WEIGHTS_KEY = "control.sock", "weights.key"


@dataclass(frozen=True)
class Endpoints:
    """Resources that roles of one run on this machine share: the shared memory for weights (`mailbox`: its name, in
    `mailbox_folder`), the folder of their `sockets`, the record of chosen `kernels` (None: none is kept), the GPU
    `seats` (empty: all on the CPU)."""

    mailbox: str  # name of the shared memory with published weights
    mailbox_folder: Path  # where the shared memory is
    sockets: Path  # folder of the roles' Unix sockets
    kernels: Path | None = None  # file with the chosen matmul kernels; None: the choices are not recorded
    seats: tuple[Seat, ...] = ()  # assignment of roles to GPUs; empty: all run on the CPU


def engine_specs(recipe: Recipe, model: Path, endpoints: Endpoints, *, published: bool = True) -> list[EngineSpec]:
    """Return the specs of the engines that the run itself starts. `model`: folder of version 0; `published`: a trainer
    publishes weights; False: the engines serve the model folder."""
    return [engine_spec(recipe, model, endpoints, number, published) for number in range(recipe.local_engines)]


def engine_spec(
    recipe: Recipe, model: Path, endpoints: Endpoints, number: int, published: bool, seat_number: int | None = None
) -> EngineSpec:
    """Return the spec of engine `number` (from 0) on the run's own machine.

    Args:
        model: folder of version 0.
        published: a trainer publishes weights; False: the engine serves the model folder.
        seat_number: number of the engine whose GPUs it takes; None: `number`.
    """
    config, deadlines = recipe.engine, recipe.deadlines
    unix = config.transport == "unix"
    seat = seat_of_engine(endpoints.seats, number if seat_number is None else seat_number)
    return EngineSpec(
        name=f"engine-{number}",
        address=f"unix:{endpoints.sockets}/engine-{number}.sock" if unix else f"127.0.0.1:{config.base_port + number}",
        model=str(model),
        mailbox=endpoints.mailbox,
        mailbox_folder=str(endpoints.mailbox_folder),
        config=config.model_dump_json(),
        threads=config.threads,
        # The trainer starts at the same time, and publishes after that.
        publication_seconds=deadlines.start + deadlines.save if published else 0.0,
        kernels=str(endpoints.kernels) if endpoints.kernels is not None else None,
        server=config.addresses[number] if number < len(config.addresses) else None,
        scratch=str(endpoints.sockets / f"engine-{number}"),
        token_seconds=deadlines.answer / 2,  # below `answer`, so that another engine can continue in time
        load_seconds=deadlines.load,
        start_seconds=deadlines.start,
        broadcast=recipe.weights.medium == "broadcast",
        path=recipe.path or "",
        gpus=seat.ids if seat is not None else (),
        share=_share(config, seat),
        memory=min(gpu.memory for gpu in seat.gpus) if seat is not None else 0,
        planned=sum(seat.need.parts.values()) if seat is not None else 0,
    )


def _share(config: EngineConfig, seat: Seat | None) -> float:
    """Return the share of its GPUs' memory that an engine may take, between 0 and 1; 1 on a CPU (`seat` None). For a
    server, which does not start if less is free, it is at most what is free."""
    if seat is None:
        return 1.0
    return seat.share if config.kind == "native" else seat.room


def _evidence(recipe: Recipe) -> Evidence:
    """Return which tokens' recorded log-probabilities judge an engine: "all" if it recomputes its KV cache at updates.
    If it keeps the cache, the trainer cannot compute the same: then "uninterrupted", or "none" for a server."""
    if recipe.engine.on_update == "recompute":
        return "all"
    return "uninterrupted" if recipe.engine.kind == "native" else "none"


def trainer_spec(plan: Plan, model: Path, endpoints: Endpoints, tokens: Path) -> TrainerSpec:
    """Return the spec of the trainer. `model`: folder of version 0; `tokens`: folder for per-token data."""
    recipe, folder = plan.recipe, inspect_model_folder(model)
    seats = [seat for seat in endpoints.seats if seat.need.apart or seat.need.role == "rank 0"]
    kept = TokensSpec(folder=str(tokens), config=recipe.logging.model_dump_json(include=set(TokensConfig.model_fields)))
    return TrainerSpec(
        model=str(model),
        mailbox=endpoints.mailbox,
        mailbox_folder=str(endpoints.mailbox_folder),
        trainer=recipe.trainer.model_dump_json(),
        algorithm=recipe.algorithm.model_dump_json(),
        sampling=plan.sampling,
        threads=recipe.trainer.threads,
        kernels=str(endpoints.kernels) if endpoints.kernels is not None else None,
        published=_published(recipe),
        held=recipe.engine.dtype,
        evidence=_evidence(recipe),
        rank_host=_rank_host(recipe) if recipe.trainer.remote_ranks else "",
        tls=str(Path(tls).absolute()) if recipe.trainer.remote_ranks and (tls := recipe.cluster.tls) else "",
        path=recipe.path or "",
        tokens=kept if recipe.logging.tokens != "none" else None,
        canary=canary_text(folder.vocab_size, folder.context_length, plan.sampling.stop_token_ids, recipe.seed),
        gpus=tuple(seat.ids[0] for seat in seats),
        share=min((seat.share for seat in seats), default=1.0),
    )


def _rank_host(recipe: Recipe) -> str:
    """Return the address of this machine for ranks on other machines: the host of `cluster.listen`, or, if that is
    every interface, the machine's own address."""
    host = recipe.cluster.listen.rpartition(":")[0]
    return own_address() if host in ("", "0.0.0.0", "[::]") else host


def own_address() -> str:
    """Return the IP address of this machine in its network; the loopback address if there is no network."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # no packet is sent: the kernel chooses the interface of the default route
            address: str = probe.getsockname()[0]
        except OSError:
            return "127.0.0.1"
        return address


def _published(recipe: Recipe) -> str | None:
    """Return the dtype to which all engines round the weights when they load them; the trainer may then publish rounded
    weights. None: it may not, since engines do not round, since adapters are published (they are rounded after
    merging), or since servers at given addresses decide by their own flags."""
    engine = recipe.engine
    if engine.dtype == "float32" or recipe.trainer.lora is not None or engine.addresses:
        return None
    return engine.dtype
