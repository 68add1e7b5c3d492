"""Transfer of weights to one vLLM or SGLang server by collective broadcast, for servers without access to this
machine's files. This process is rank 0 of a process group, the server's workers are the other ranks.

    join      an HTTP request; both sides meet at a TCP store, which this process opens
    begin     the server prepares its model for new weights
    receive   an HTTP request with names, dtypes and shapes of some tensors, and a broadcast of each
    end       the server finishes its model and sets the version

Each server has its own group, so that engines may come and go. A server does not check checksums, so that only the
transport protects the bytes; therefore "auto" never chooses this medium (`weights.config`). After an error, group and
server are unusable, because it is unknown which weights are new.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import socket
import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed import Backend, PrefixStore, ProcessGroup, TCPStore, distributed_c10d  # type: ignore[attr-defined]  # stores are where gloo is built in

from stretto.core.deadlines import deadline
from stretto.core.errors import EngineLost, RefusedRequest, StrettoError, WireError
from stretto.core.machine import use_interface_of
from stretto.engine.wire import split_address
from stretto_servers.http import LOOK_SECONDS, JsonServer
from stretto_servers.make import new_mark
from stretto_servers.sglang import SglangServer

#: Bytes of tensors per request; the server needs this memory in addition to its model.
_BUCKET = 256 << 20

#: HTTP request to a server: path, and JSON body to post.
Order = tuple[str, Mapping[str, object] | None]

#: Function that posts an order and returns the reply's JSON; it raises the errors of its HTTP client.
Post = Callable[[str, Mapping[str, object] | None], Awaitable[Any]]

Named = Sequence[tuple[str, Tensor]]


@dataclass
class SglangOrders:
    """Makes the HTTP requests for SGLang since 0.5.23, in which an update has a begin and an end. `group`: name of the
    process group; `backend`: "gloo" or "nccl"; `flush_cache`: drop the KV cache with each update; `mark`: ending of the
    versions' names (`make.new_mark`)."""

    group: str
    backend: str = "nccl"
    flush_cache: bool = True
    mark: str = ""

    def join(self, host: str, port: int, world_size: int) -> Order:
        where = {"master_address": host, "master_port": port, "rank_offset": 1, "world_size": world_size}
        return "/init_weights_update_group", where | {"group_name": self.group, "backend": self.backend}

    def begin(self) -> Order:
        return "/begin_weight_update", {}

    def receive(self, tensors: Named, version: int | None) -> Order:
        """Make the request to receive these tensors. `version`: None except for the last tensors of an update, which
        give the server's weights this name and may clear its cache."""
        names, dtypes, shapes = _described(tensors)
        order: dict[str, object] = {"names": names, "dtypes": dtypes, "shapes": shapes, "group_name": self.group}
        order["flush_cache"] = self.flush_cache and version is not None
        if version is not None:
            order["weight_version"] = f"{version}{self.mark}"
        return "/update_weights_from_distributed", order

    def end(self, version: int) -> Order:
        return "/end_weight_update", {}

    def leave(self) -> Order:
        return "/destroy_weights_update_group", {"group_name": self.group}


@dataclass(frozen=True)
class VllmOrders:
    """Makes the HTTP requests for vLLM since 0.32. `group`: name of the process group. The server needs a weight
    transfer engine with torch's process groups: vLLM's built-in engine "nccl" uses its own communicator, which the
    sender would have to import."""

    group: str = "stretto"

    def join(self, host: str, port: int, world_size: int) -> Order:
        where = {"master_address": host, "master_port": port, "rank_offset": 1, "world_size": world_size}
        return "/init_weight_transfer_engine", {"init_info": where}

    def begin(self) -> Order:
        return "/start_weight_update", None

    def receive(self, tensors: Named, version: int | None) -> Order:
        names, dtypes, shapes = _described(tensors)
        return "/update_weights", {"update_info": {"names": names, "dtype_names": dtypes, "shapes": shapes}}

    def end(self, version: int) -> Order:
        return "/finish_weight_update", {"weight_version": str(version)}

    def leave(self) -> Order:
        return "/shutdown_weight_transfer_engine", None


#: Makes the HTTP requests for one make of server; `group` is the group's name on both sides.
Orders = SglangOrders | VllmOrders


class Broadcast:
    """Weight transfers to one server.

    Example::

        broadcast = Broadcast("engine-0", post, SglangOrders("stretto-0", "gloo"), host="10.0.0.1", ranks=1, seconds=60)
        await broadcast.open()
        await broadcast.send(7, subscriber.load(7))      # while the server is paused
        await broadcast.close()
    """

    def __init__(
        self,
        engine: str,
        post: Post,
        orders: Orders,
        *,
        host: str,
        ranks: int,
        seconds: float,
        backend: str = "gloo",
        device: str = "cpu",
    ) -> None:
        """Prepare transfers to the server `engine`; `open` connects to it. `post` sends an HTTP request to the server.

        Args:
            host: address of this machine at which the server can reach it.
            ranks: number of the server's ranks (tensor times data parallel size).
            seconds: time limit of a join, of each request and of each broadcast.
            backend: "gloo" for tensors on the CPU, "nccl" for a GPU.
            device: device from which the tensors are sent.
        """
        self.engine = engine
        self._post, self._orders, self._seconds = post, orders, seconds
        self._host, self._world_size, self._name = host, ranks + 1, orders.group
        self._backend, self._device = backend, device
        self._group: ProcessGroup | None = None

    async def open(self) -> None:
        """Create a process group with the server's workers.

        Raises:
            EngineLost: the server did not join in time, cannot be reached, or breaks the connection.
            DeadlineExceeded: it did not reply in time.
            RefusedRequest: it replies that the request is wrong (status 400, 413 or 422).
            WireError: it replies with another status than 200.
        """
        patience = timedelta(seconds=self._seconds)
        use_interface_of(self._host)
        store = self._store(patience)

        def join() -> ProcessGroup:
            # torch has no public function for a group beside the default one; SGLang creates its end in this way too.
            made: ProcessGroup
            made, _ = distributed_c10d._new_process_group_helper(
                self._world_size,
                0,
                [],
                Backend(self._backend),
                PrefixStore(self._name, store),
                group_name=self._name,  # type: ignore[arg-type]  # a NewType of str
                timeout=patience,
            )
            distributed_c10d._world.pg_group_ranks[made] = {rank: rank for rank in range(self._world_size)}
            return made

        self._group = await self._with(self._orders.join(self._host, store.port, self._world_size), "join", join)

    def _store(self, patience: timedelta) -> TCPStore:
        """Open the TCP store. It is bound to `host` only, because it trusts every process that can connect. `patience`:
        timeout of its operations."""
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        server = socket.create_server((self._host, 0), family=family)
        port, descriptor = server.getsockname()[1], server.detach()
        return TCPStore(
            self._host,
            port,
            self._world_size,
            is_master=True,
            wait_for_workers=False,
            timeout=patience,
            master_listen_fd=descriptor,
        )

    async def send(self, version: int, tensors: Mapping[str, Tensor]) -> None:
        """Send the tensors to the paused server as `version`; call it after `open`. After any error the group is
        closed, and server and group are unusable.

        Raises:
            EngineLost: a broadcast failed or took too long, or the server's connection broke.
            DeadlineExceeded: the server did not reply in time.
            RefusedRequest: it replies that a request is wrong (status 400, 413 or 422).
            WireError: it replies with another status than 200.
        """
        assert self._group is not None, "open() comes first"
        group, buckets = self._group, list(_buckets(tensors))
        try:
            await self._order(self._orders.begin(), "begin")
            for number, bucket in enumerate(buckets):
                last = version if number == len(buckets) - 1 else None

                def send(bucket: Named = bucket) -> None:
                    for _, tensor in bucket:
                        whole = tensor.to(self._device).contiguous()
                        group.broadcast(whole, 0).wait(timedelta(seconds=self._seconds))

                await self._with(self._orders.receive(bucket, last), f"version {version}", send)
            await self._order(self._orders.end(version), "end")
        except BaseException:
            self._close_group()
            raise

    async def close(self) -> None:
        """Make the server leave the process group, and close this side of it. Does nothing without a group. This side
        is closed even if the request to the server fails, whose error is raised."""
        if self._group is not None:
            try:
                await self._order(self._orders.leave(), "leave")
            finally:
                self._close_group()

    def _close_group(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            with contextlib.suppress(RuntimeError):  # the server has left already
                torch.distributed.destroy_process_group(group)

    async def _order(self, order: Order, what: str) -> None:
        async with deadline(f"the broadcast to {self.engine}", what, self._seconds):
            await self._post(*order)

    async def _with(self, order: Order, what: str, work: Callable[[], Any]) -> Any:
        """Post an order, and meanwhile run `work`, this side's part of the collective, in a thread; returns its result.
        Raises EngineLost if the collective fails, and the errors of the order. If the server refuses, the thread ends
        by the collective's own timeout. Nothing waits for it, not even the exit of this process. `what` names the step
        in errors."""
        posted = asyncio.ensure_future(self._order(order, what))
        done = _in_a_thread(work)
        try:
            # Both are bounded: the order by its deadline, the collective by the group's.
            await asyncio.wait({posted, done}, return_when=asyncio.FIRST_EXCEPTION)
            if posted.done():
                posted.result()
            result = await done
            await posted
            return result
        except RuntimeError as error:  # the only type that torch's collectives raise
            how = str(error).partition("\n")[0][:200]
            raise EngineLost(self.engine, f"did not receive {what}: {how}") from error
        finally:
            posted.cancel()
            done.add_done_callback(lambda task: task.cancelled() or task.exception())


def _in_a_thread(work: Callable[[], Any]) -> asyncio.Future[Any]:
    """Run `work` in a daemon thread, which a closing event loop does not join; return a future of its result."""
    loop, done = asyncio.get_running_loop(), Future[Any]()
    done.set_running_or_notify_cancel()  # so that a cancelled wait leaves the thread a future to put its result in

    def run() -> None:
        try:
            done.set_result(work())
        except Exception as error:  # raised by the future
            done.set_exception(error)

    awaited = asyncio.wrap_future(done, loop=loop)
    threading.Thread(target=run, name="broadcast", daemon=True).start()
    return awaited


def _described(tensors: Named) -> tuple[list[str], list[str], list[list[int]]]:
    names = [name for name, _ in tensors]
    dtypes = [str(tensor.dtype).removeprefix("torch.") for _, tensor in tensors]
    return names, dtypes, [list(tensor.shape) for _, tensor in tensors]


def _buckets(tensors: Mapping[str, Tensor]) -> Iterator[Named]:
    bucket: list[tuple[str, Tensor]] = []
    size = 0
    for name, tensor in tensors.items():
        if bucket and size + tensor.nbytes > _BUCKET:
            yield bucket
            bucket, size = [], 0
        bucket.append((name, tensor))
        size += tensor.nbytes
    if bucket:
        yield bucket


_RANKS = "tp_size"
_ALONE = ("dp_size", "pp_size")  # must be 1: a worker's rank in the group is its tensor parallel rank


class SglangByBroadcast(SglangServer):
    """Same as `SglangServer`, but `load` reads the tensors here, after the version was verified, and broadcasts them to
    the server's workers. After an error the group is lost; the next adapter process creates a new one."""

    def __init__(self, http: JsonServer, load_seconds: float, address: str, backend: str) -> None:
        """Prepare the client; the group is created by the first `load`. `address`: the server's, ``host:port``.
        `backend`: "gloo" for a CPU server, "nccl" for GPUs."""
        super().__init__(http, load_seconds)
        self._address, self._backend = address, backend
        self._group: Broadcast | None = None
        self._orders = SglangOrders("", backend)

    async def load(self, folder: Path, version: int, *, keep: bool) -> None:
        tensors, self.mark = await asyncio.to_thread(_read, folder), self.mark or new_mark()
        if self._group is None:
            self._group = await self._joined()
        self._orders.flush_cache = not keep
        await self._group.send(version, tensors)

    async def close(self) -> None:
        """Ask the server to leave the group, if it still replies, and close the connections."""
        if self._group is not None:
            with contextlib.suppress(StrettoError, TimeoutError):
                async with asyncio.timeout(LOOK_SECONDS):
                    await self._group.close()
        await super().close()

    async def _joined(self) -> Broadcast:
        told = await self._http.exchange("GET", "/server_info")
        if wrong := [f"{key} {told[key]}" for key in _ALONE if told.get(key, 1) != 1]:
            raise WireError(f"{self._http.name} has {wrong[0]}: a broadcast reaches tensor parallel ranks alone")
        with contextlib.suppress(RefusedRequest):  # ends the update of an adapter that was killed during it, if any
            await self._post("/end_weight_update", {})
        self._orders = SglangOrders(f"stretto-{secrets.token_hex(8)}", self._backend, mark=self.mark)
        group = Broadcast(
            self._http.name,
            self._post,
            self._orders,
            host=await asyncio.to_thread(_own_address, self._address),
            ranks=told.get(_RANKS, 1),
            seconds=self._load_seconds,
            backend=self._backend,
            device="cpu" if self._backend == "gloo" else "cuda",
        )
        await group.open()
        return group

    async def _post(self, path: str, order: Mapping[str, object] | None) -> Any:
        reply = await self._http.exchange("POST", path, order, self._load_seconds)
        if not isinstance(reply, dict) or not reply.get("success"):
            raise WireError(f"{self._http.name} refuses {path}: {reply}")
        return reply


def _read(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def _own_address(server: str) -> str:
    """IP address (no port) at which `server` (``host:port``) can reach this machine, found by opening a connection to
    it. Raises OSError if that fails."""
    _, host, port = split_address(server)
    with socket.create_connection((host, port), LOOK_SECONDS) as probe:
        address: str = probe.getsockname()[0]
    return address
