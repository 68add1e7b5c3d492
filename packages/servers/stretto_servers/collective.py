"""SGLang client that sends weights by broadcast, for servers without access to this machine's files."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

from stretto.core.errors import RefusedRequest, StrettoError, WireError
from stretto.engine.wire import split_address
from stretto_servers.broadcast import Broadcast, SglangOrders
from stretto_servers.http import LOOK_SECONDS, JsonServer
from stretto_servers.sglang import SglangServer

_RANKS = "tp_size"
_ALONE = ("dp_size", "pp_size")  # must be 1: a worker's rank in the group is its tensor parallel rank


class SglangByBroadcast(SglangServer):
    """Same as `SglangServer`, but `load` reads the tensors here, after the version was verified, and broadcasts them to
    the server's workers. After an error the group is lost; the next adapter process creates a new one."""

    def __init__(self, http: JsonServer, load_seconds: float, address: str, backend: str) -> None:
        """`address`: the server's, ``host:port``. `backend`: "gloo" for a CPU server, "nccl" for GPUs."""
        super().__init__(http, load_seconds)
        self._address, self._backend = address, backend
        self._group: Broadcast | None = None

    async def load(self, folder: Path, version: int, *, keep: bool) -> None:
        tensors = await asyncio.to_thread(_read, folder)
        if self._group is None:
            self._group = await self._joined(keep)
        await self._group.send(version, tensors)

    async def close(self) -> None:
        """Ask the server to leave the group, if it still replies, and close the connections."""
        if self._group is not None:
            with contextlib.suppress(StrettoError, TimeoutError):
                async with asyncio.timeout(LOOK_SECONDS):
                    await self._group.close()
        await super().close()

    async def _joined(self, keep: bool) -> Broadcast:
        told = await self._http.exchange("GET", "/server_info")
        if wrong := [f"{key} {told[key]}" for key in _ALONE if told.get(key, 1) != 1]:
            raise WireError(f"{self._http.name} has {wrong[0]}: a broadcast reaches tensor parallel ranks alone")
        with contextlib.suppress(RefusedRequest):  # ends the update of an adapter that was killed during it, if any
            await self._post("/end_weight_update", {})
        orders = SglangOrders(f"stretto-{secrets.token_hex(8)}", self._backend, flush_cache=not keep)
        group = Broadcast(
            self._http.name,
            self._post,
            orders,
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
    """Address of this machine at which the server can reach it, found by opening a connection to the server."""
    _, host, port = split_address(server)
    with socket.create_connection((host.strip("[]"), port), LOOK_SECONDS) as probe:
        address: str = probe.getsockname()[0]
    return address
