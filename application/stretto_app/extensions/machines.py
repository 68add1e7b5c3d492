"""Other machines in a run: gate, weights server, and the engines on these machines."""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NoReturn

import msgspec

from stretto.core.errors import DeadlineExceeded, Problem, RecipeError, described, several
from stretto.core.events import Span
from stretto.core.tasks import NamedTasks, each_to_the_end, first_of
from stretto.launch.assemble.beside import MachineParts, Machines
from stretto.launch.assemble.specs import CONTROL, WEIGHTS_KEY, Endpoints, engine_spec, own_address
from stretto.launch.preflight.checks import medium_of
from stretto.launch.preflight.descriptors import no_room_for
from stretto.launch.preflight.plan import Plan
from stretto.launch.recipe.recipe import Recipe
from stretto.loop.engines.handle import EngineHandle
from stretto.loop.engines.pool import EnginePool
from stretto.loop.records.totals import Tenure
from stretto.processes.http.tls import client_context
from stretto.processes.role import RoleProcess
from stretto.processes.spawn import TOKEN, Spawner
from stretto.processes.supervisor import RestartBudget, Supervisor
from stretto.store.run_folder import RunFolder
from stretto.weights.config import ChosenMedium
from stretto.weights.folder import release
from stretto_app.extensions.ray_agents import RayAgents, placing_seconds
from stretto_app.extensions.remote_ranks import RemoteRanks
from stretto_cluster.address import JOIN, PATIENCE_SECONDS, JoinFile, bound, recorded_join_file
from stretto_cluster.gate import Doors, Gate
from stretto_cluster.guest import guest
from stretto_cluster.handshake import new_key
from stretto_cluster.machine import JoinedMachine
from stretto_cluster.messages import AGENTS_TLS, Join, RunTerms
from stretto_cluster.placing import RayPlacerSpec
from stretto_cluster.succession import RunSuperseded, tell
from stretto_cluster.weights.server import WeightsServerSpec

_WEIGHTS_ROLE = "stretto_cluster.weights.server"
_STOP_GRACE = 1.0
_ANYWHERE = "0.0.0.0:0"
_LOOK_SECONDS = 1.0
_MOST_ENGINES = 1024
_FIRST = asyncio.FIRST_COMPLETED


@dataclass
class Cluster(Machines):
    """Machines of a run, made by `cluster_of`. The pool `engines` grows and shrinks by `stretto scale`, and as machines
    come and go. `identity`: name and token of the run, as a join file without addresses; `report` gets sentences for
    the log. `tenure` identifies this conductor among those of the run."""

    plan: Plan
    folder: RunFolder
    endpoints: Endpoints
    engines: EnginePool
    report: Callable[[str], None]
    spawner: Spawner
    identity: JoinFile
    tenure: Tenure
    ranks: RemoteRanks = field(init=False)
    weights_port: int = 0
    weights_key: str = field(default_factory=lambda: secrets.token_hex(32))
    _next: int = 0
    _address: str = ""  # address of the gate for machines
    _scaling: asyncio.Lock = field(default_factory=asyncio.Lock)
    _tasks: NamedTasks = field(default_factory=NamedTasks)
    _ray: RayAgents | None = None
    _newer: tuple[int, str] | None = None  # epoch and address of the conductor that this one gives way to
    _hosts: dict[str, JoinedMachine] = field(default_factory=dict)  # machine of each guest engine, by the engine's name
    _seat_numbers: dict[int, int] = field(default_factory=dict)  # seats of engines that `stretto scale` has started
    _restarts: RestartBudget = field(init=False)  # of the server of weights

    def __post_init__(self) -> None:
        deadlines = self.plan.recipe.deadlines
        self._restarts = RestartBudget(deadlines.engine_restarts, deadlines.restart_window)
        self._next = len(self.engines.names)
        self.ranks = RemoteRanks(deadlines.start / 2, self.plan.recipe.trainer.together)
        self._context = client_context(self.plan.recipe.cluster.tls or "")
        doors = Doors(
            terms=self._terms,
            joined=self._joined,
            scale=self.scale,
            say=self.report,
            logs=self.folder.logs,
            superseded=self._superseded,
            refuses=lambda join: _why_not(self.plan.recipe, join),
        )
        self.gate = Gate(self.identity.run, self.identity.token, doors)
        self.engines.announce = self.gate.publish

    async def open(self) -> None:
        """Listen for commands, and for machines if the recipe has an address or Ray starts the agents. Writes
        ``join.json`` and starts the weights server and agents.

        Raises:
            RecipeError: an address cannot be bound; or Ray does not run, or has too few resources.
            RoleFailed, RoleDied, DeadlineExceeded: the process that places agents on Ray failed.
        """
        config, medium = self.plan.recipe.cluster, self.medium
        self.report(f"weights.medium is {medium.medium}: {medium.reason}")
        control = await self.gate.open(f"unix:{self.endpoints.sockets}/{CONTROL}")
        address = ""
        if listen := config.listen or (_ANYWHERE if config.placer == "ray" else ""):
            self._serve_weights(listen)
            address = await self.gate.open(listen, config.tls or "")
            host, _, port = address.rpartition(":")
            address = f"{own_address() if host in ('0.0.0.0', '[::]') else host}:{port}"
            self._address = address
            self.report(
                f"machines can join: stretto engine --join {address} (the token is in {self.folder.path / JOIN})"
            )
        tls = str(Path(config.tls).absolute()) if config.tls else ""
        patience = PATIENCE_SECONDS + (placing_seconds(config.wait) if config.placer == "ray" else 0.0)
        told = msgspec.structs.replace(self.identity, address=address, control=control, tls=tls, patience=patience)
        write_join_file(self.folder, told)
        for before in told.before:
            if before != address:
                self._tasks.add(f"succession to {before}", self._tell(told, before))
        if config.placer == "ray":
            await self._place_by_ray(address)

    @property
    def medium(self) -> ChosenMedium:
        """Medium by which weights reach the engines, with the reason for the choice."""
        return medium_of(self.plan.recipe)

    async def supervise(self) -> NoReturn:
        """Keep the weights server and the Ray placer running, until cancelled.

        Raises:
            RoleDied: one of them died too often.
            RunSuperseded: a newer conductor has the run.
        """
        await self._tasks.watch()

    def drain_spans(self) -> list[Span]:
        """Return the spans of the mirrors on other machines since the last call. Spans show that the weights server
        works, and reset its count of deaths in a row."""
        spans = []
        for machine in self.gate.machines.values():
            spans += machine.spans
            machine.spans = []
        if spans:  # the server of weights has served
            self._restarts.progressed()
        return spans

    async def close(self, why: str, again: bool) -> None:
        """Dismiss every machine, end the weights server and the Ray placer, and remove the addresses from
        ``join.json``. All of these are done even if one fails; the first error is raised afterwards. `why`: the reason
        that machines get; `again`: whether they may try to join later."""
        ray = self._ray
        await each_to_the_end(
            self._forget_addresses,
            partial(self.gate.close, why, again),
            self._tasks.close,
            *((ray.close,) if ray is not None else ()),
        )

    async def _forget_addresses(self) -> None:
        if self._newer is not None:
            self._remember(*self._newer)
        elif self.folder.is_ours():
            write_join_file(self.folder, self.identity)  # without addresses; name and token stay for a resume

    async def _tell(self, known: JoinFile, before: str) -> None:
        try:
            if said := await tell(known, before, self.tenure, self.plan.recipe.cluster.tls or ""):
                self.report(said)
        except RunSuperseded as newer:
            with suppress(OSError):  # reported, and written once more by `close`
                self._record_newer(newer.epoch, newer.address)
            raise
        except DeadlineExceeded as late:  # a resume tries again
            self.report(str(late))
            return
        others = tuple(address for address in self.identity.before if address != before)
        self.identity = msgspec.structs.replace(self.identity, before=others)

    def _superseded(self, epoch: int, address: str) -> None:
        """Give way to a newer conductor (`epoch`, `address`), even if this cannot be recorded. Raises OSError while it
        cannot be recorded: the newer conductor then gets no reply, and asks again."""
        if self._newer is None:  # otherwise it is ending already
            self._tasks.add("superseded", self._give_way(epoch, address))
        if not self.identity.superseded:
            self._record_newer(epoch, address)

    def _record_newer(self, epoch: int, address: str) -> None:
        self._newer = self._newer or (epoch, address)
        try:
            self._remember(*self._newer)
        except OSError as error:
            self.report(f"not recorded that a newer conductor has the run: {described(error)}")
            raise

    def _remember(self, epoch: int, address: str) -> None:
        """Record in ``join.json``, unless another process has taken the folder, that a newer conductor (`epoch`) at
        `address` has the run, to refuse a resume of this folder."""
        before = _with(self.identity.before, address)
        identity = msgspec.structs.replace(self.identity, before=before, superseded=epoch)
        if self.folder.is_ours():
            write_join_file(self.folder, identity)
        self.identity = identity

    async def _give_way(self, epoch: int, address: str) -> NoReturn:
        raise RunSuperseded(self.identity.run, epoch, address)

    async def _place_by_ray(self, address: str) -> None:
        recipe = self.plan.recipe
        tls = ("--tls", recipe.cluster.tls) if recipe.cluster.tls else ()
        spec = RayPlacerSpec(
            run=self.identity.run,
            address=recipe.cluster.ray,
            join=("--join", address, "--patience", f"{recipe.cluster.wait:g}", *tls),
            cpus=recipe.engine.threads,
            gpus=recipe.cluster.gpus,
            seconds=recipe.cluster.wait,
        )
        self._ray = RayAgents(recipe.deadlines, self.folder.role_log("ray"), spec, self.identity.token, self.report)
        await self._ray.place(recipe.engine.count, recipe.trainer.remote_ranks)
        self._tasks.add("ray", self._ray.supervise())

    # ── weights server ───────────────────────────────────────────────────────────────────────────

    def _serve_weights(self, listen: str) -> None:
        key_file = self.endpoints.sockets / WEIGHTS_KEY
        key_file.touch(0o600)
        key_file.write_text(self.weights_key, encoding="utf-8")
        reserved = bound(listen, 0)
        host, self.weights_port = reserved.getsockname()[:2]
        spec = WeightsServerSpec(
            run=self.endpoints.mailbox,
            folder=str(self.endpoints.mailbox_folder),
            model=str(self.folder.policy(0)),
            address=f"{host}:{self.weights_port}",
            key_file=str(key_file),
            tls=self.plan.recipe.cluster.tls,
            reference=self._reference,
        )
        self._tasks.add("weights", self._keep_serving(spec, reserved))

    async def _keep_serving(self, spec: WeightsServerSpec, reserved: socket.socket) -> None:
        log, hung = self.folder.role_log("weights"), self.plan.recipe.deadlines.hung
        process = RoleProcess("weights", _WEIGHTS_ROLE, log, hung, self.spawner)
        supervisor = Supervisor(
            "the server of weights", lambda: process.start(spec, 1), self._restarts, self.report, str(log)
        )
        with reserved:  # keeps the port reserved over restarts
            try:
                await supervisor.begin()
                await supervisor.keep(process.ended)
            finally:
                await process.stop(_STOP_GRACE)

    # ── machines ─────────────────────────────────────────────────────────────────────────────────

    def _terms(self) -> RunTerms:
        return RunTerms(
            run=self.identity.run,
            mailbox=self.endpoints.mailbox,
            weights_port=self.weights_port,
            weights_key=self.weights_key,
            delta=self.plan.recipe.weights.delta,
            size=self.plan.base.parameters * 4,
            published=self.engines.published,
            lease=self.plan.recipe.cluster.lease,
            hung=self.plan.recipe.deadlines.hung,
            tenure=self.tenure,
            pull=self.plan.recipe.deadlines.pull,
            reference=self._reference is not None,
        )

    @property
    def _reference(self) -> str | None:
        reference, ranks = self.plan.recipe.algorithm.reference, self.plan.recipe.trainer.remote_ranks
        return reference.path if reference is not None and ranks else None

    def _joined(self, machine: JoinedMachine) -> None:
        if machine.kind == "rank":
            self.report(f"{machine.host} has joined: it takes {len(machine.places)} rank(s) of the trainer")
            self.ranks.joined(machine)
            self._tasks.add(machine.name, self._let_go(machine))
            return
        names = [self._join(machine, place) for place in range(len(machine.places))]
        self.report(f"{machine.host} has joined: it starts {', '.join(names)}, with weights over the network")
        self._tasks.add(machine.name, self._look_after(machine, names))

    async def _let_go(self, machine: JoinedMachine) -> None:
        """Wait until a machine of ranks asks to leave, then dismiss it, or until it is lost. The trainer then restarts,
        and its ranks take places on other machines."""
        await first_of(machine.leaving, machine.lost)
        if not machine.lost.done():
            self.report(f"{machine.host} has left, with its rank(s) of the trainer: {machine.leaving.result()}")
            machine.dismiss(machine.leaving.result())

    def _join(self, machine: JoinedMachine, number: int) -> str:
        plan, place = self.plan, machine.places[number]
        spec = msgspec.structs.replace(
            engine_spec(plan.recipe, Path(machine.model), self.endpoints, self._take_number(), published=True),
            address=place.address,
            mailbox_folder=machine.mailbox_folder,
            scratch=place.scratch,
            kernels=None,
            gpus=(),
            share=1.0,
            tls=AGENTS_TLS if plan.recipe.cluster.tls else "",
        )
        recipe, changed = plan.recipe, self.engines.changed
        role, interval = recipe.engine.role, recipe.engine.load_interval
        self._hosts[spec.name] = machine
        pool, deadlines = self.engines, recipe.deadlines
        told = pool.proving, interval, self._context, lambda: pool.published, plan.base.vocab_size
        pool.join(guest(spec, number, machine, role, deadlines, changed, *told))
        return spec.name

    def _take_number(self) -> int:
        number, self._next = self._next, self._next + 1
        return number

    async def _look_after(self, machine: JoinedMachine, names: list[str]) -> None:
        """Drain a machine's engines (`names`) when it asks to leave, and dismiss it when it has none left. Returns when
        the machine is gone and its engines have left the pool."""
        while not (machine.leaving.done() or machine.lost.done()):
            await asyncio.wait([machine.leaving, machine.lost], timeout=_LOOK_SECONDS, return_when=_FIRST)
            if not any(self.engines.has(name) for name in names):
                machine.dismiss("its engines have left the run, whose log says why")
                break
        if machine.leaving.done() and not machine.lost.done():
            await self.engines.drain(names, machine.leaving.result())
            machine.dismiss(machine.leaving.result())
        await machine.lost
        for name in names:
            self._hosts.pop(name, None)
            await self.engines.leave(name, f"{machine.host} {machine.lost.result()}")

    # ── stretto scale ────────────────────────────────────────────────────────────────────────────

    async def scale(self, wanted: int) -> str:
        """Change the number of engines to `wanted`, and return a sentence for the user. To have fewer, drain the newest
        and then end them.

        Raises:
            RecipeError: the number is out of range, or the run or its Ray cluster cannot start more.
            RoleFailed, RoleDied, DeadlineExceeded: the process that places agents on Ray failed.
        """
        if not 1 <= wanted <= _MOST_ENGINES:
            raise RecipeError(
                [Problem("engines", str(wanted), f"a run needs one engine at least, and has {_MOST_ENGINES:,} at most")]
            )
        async with self._scaling:
            return await self._scale(wanted)

    async def _scale(self, wanted: int) -> str:
        names = self.engines.names
        if wanted > len(names):
            return await self._grow(wanted)
        leaving = names[wanted:]
        await self.engines.drain(leaving, "stretto scale")
        for name in leaving:
            self._dismiss_if_empty(name)
            release(self.endpoints.mailbox, self.endpoints.mailbox_folder, name)
        if self._ray is not None:
            await self._ray.place(wanted, self.plan.recipe.trainer.remote_ranks)
        return several(wanted, "engine") + (f"; {', '.join(leaving)} left" if leaving else "")

    async def _grow(self, wanted: int) -> str:
        config = self.plan.recipe.cluster
        if self._ray is not None:
            await self._ray.place(wanted, self.plan.recipe.trainer.remote_ranks)
            return f"{several(wanted, 'engine')}; Ray is starting them"
        if config.placer != "local":
            remedy = f"start them on machines: stretto engine --join {self._address}"
            raise RecipeError([Problem("engines", f"cluster.placer is {config.placer!r}", remedy)])
        seats = sum(seat.need.role.startswith("engine-") for seat in self.endpoints.seats)
        if seats and wanted > seats:
            found = f"{wanted}, and the GPUs of this machine are divided among {seats} (engine.count)"
            raise RecipeError([Problem("engines", found, f"at most {seats}, or engine.count = {wanted} in the recipe")])
        started = [self._start_one() for _ in range(wanted - len(self.engines.names))]
        are = "is" if len(started) == 1 else "are"
        return f"{several(len(self.engines.names), 'engine')}; {', '.join(started)} {are} starting"

    def _start_one(self) -> str:
        recipe = self.plan.recipe
        number = self._take_number()
        spec = engine_spec(recipe, self.folder.policy(0), self.endpoints, number, True, self._free_seat(number))
        role, interval, logs = recipe.engine.role, recipe.engine.load_interval, self.folder.logs
        pool = self.engines
        facts = role, self.spawner, pool.changed, pool.proving, interval
        pool.join(EngineHandle.on_this_machine(spec, logs, recipe.deadlines, *facts))
        return spec.name

    def _free_seat(self, number: int) -> int:
        """First seat (share of this machine's GPUs) that no engine has, by its index. It is noted as taken by engine
        `number`."""
        numbers = [int(name.rpartition("-")[2]) for name in self.engines.names]
        taken = {self._seat_numbers.get(one, one) for one in numbers}
        self._seat_numbers[number] = next(seat for seat in range(len(taken) + 1) if seat not in taken)
        return self._seat_numbers[number]

    def _dismiss_if_empty(self, name: str) -> None:
        machine = self._hosts.pop(name, None)
        if machine is not None and machine not in self._hosts.values():
            machine.dismiss("stretto scale")


def cluster_of(parts: MachineParts) -> Cluster:
    """Create the machines of a run, with the name and token recorded in its folder (see `identity_of`). Nothing is
    started before `Cluster.open`."""
    known = identity_of(parts.folder)
    return Cluster(
        parts.plan, parts.folder, parts.endpoints, parts.engines, parts.report, parts.spawner, known, parts.tenure
    )


def _why_not(recipe: Recipe, join: Join) -> str:
    """Reason why a machine may not join the run; "" if it may."""
    if join.kind not in ("engine", "rank"):
        return f"there is no role {join.kind!r}; machines run an engine or a rank"
    if join.kind == "rank" and not recipe.trainer.remote_ranks:
        return "the run's trainer has no ranks on other machines (trainer.remote_ranks = 0)"
    if join.kind == "engine" and recipe.engine.addresses:
        return "the run's engines are the servers of engine.addresses; it takes machines for ranks alone"
    place, section = ("trainer", recipe.trainer) if join.kind == "rank" else ("engine", recipe.engine)
    if section.device == "cuda" and not join.gpu:
        return f"{place}.device is 'cuda', and this machine shows no GPU (nvidia-smi, CUDA_VISIBLE_DEVICES)"
    each = 1 if join.kind == "rank" else recipe.engine.gpus
    if section.device != "cpu" and join.gpus and join.count * each > join.gpus:
        needed = f"{join.count} roles need {join.count * each} GPUs, and this machine shows {join.gpus}"
        return f"{needed}: give --count {join.gpus // each}" if join.gpus >= each else needed
    return no_room_for(join.count) if join.kind == "engine" else ""


def write_join_file(folder: RunFolder, content: JoinFile) -> None:
    """Write ``join.json`` into the run folder, atomically, readable only by this user."""
    part = folder.path / f".{JOIN}.{os.getpid()}.part"
    descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(msgspec.json.format(msgspec.json.encode(content)) + b"\n")
        file.flush()
        os.fsync(file.fileno())
    part.replace(folder.path / JOIN)


def identity_of(folder: RunFolder) -> JoinFile:
    """Join file of a new conductor: the run's name and token recorded in the folder (new ones if there are none),
    without addresses. The last conductor's address is added to its field `before`. Nothing is written.

    A token in the environment variable STRETTO_TOKEN replaces the recorded one; the variable is removed.

    Raises:
        RunFolderError: the join file is damaged.
    """
    known = recorded_join_file(folder.path)
    if known is None:
        known = JoinFile(run=f"{folder.path.name}-{secrets.token_hex(4)}", token=new_key())
    token = os.environ.pop(TOKEN, "") or known.token  # removed, because roles would inherit it
    before = _with(known.before, known.address or known.control)  # one address for each conductor
    return msgspec.structs.replace(known, token=token, address="", control="", tls="", before=before)


def _with(before: tuple[str, ...], address: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys((*before, *filter(None, (address,)))))
