"""A server that receives weights, as small as it can be: the orders that SGLang and vLLM document, over HTTP, and its
own end of the group on gloo, made as SGLang makes it. ``python receiver.py FILE`` prints its port; each update that
ends writes its tensors to FILE."""

import json
import sys
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed import (  # type: ignore[attr-defined]  # stores are where gloo is built in
    Backend,
    PrefixStore,
    ProcessGroup,
    TCPStore,
    distributed_c10d,
)


class Receiver:
    """What the orders do."""

    def __init__(self, file: str, ranks: dict[str, int]) -> None:
        self._file, self.ranks = file, ranks
        self._group: ProcessGroup | None = None
        self._tensors: dict[str, Tensor] | None = None
        self._version = ""

    def answer(self, path: str, order: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        if path in ("/init_weights_update_group", "/init_weight_transfer_engine"):
            self._join(order.get("init_info", order), order.get("group_name", "stretto"))
        elif path in ("/begin_weight_update", "/start_weight_update"):
            self._tensors = {}
        elif path in ("/update_weights_from_distributed", "/update_weights"):
            if self._tensors is None:
                return 400, {"success": False, "message": "must run between begin and end"}
            self._receive(order.get("update_info", order))
            self._version = order.get("weight_version", self._version)
        elif path in ("/end_weight_update", "/finish_weight_update"):
            if self._tensors is None:
                return 400, {"success": False, "message": "no update is open"}
            self._version = order.get("weight_version", self._version)
            save_file(self._tensors, self._file, {"version": self._version})
            self._tensors = None
        elif path in ("/destroy_weights_update_group", "/shutdown_weight_transfer_engine"):
            torch.distributed.destroy_process_group(self._group)
            self._group = None
        return 200, {"success": True, "message": ""}

    def _join(self, where: dict[str, Any], name: str) -> None:
        address, port, size = where["master_address"], where["master_port"], where["world_size"]
        rank, patience = where["rank_offset"], timedelta(seconds=30)
        store = TCPStore(address, port, size, is_master=False, timeout=patience)
        self._group, _ = distributed_c10d._new_process_group_helper(
            size,
            rank,
            [],
            Backend("gloo"),
            PrefixStore(name, store),
            group_name=name,  # type: ignore[arg-type]  # a NewType of str
            timeout=patience,
        )
        distributed_c10d._world.pg_group_ranks[self._group] = {0: 0, 1: 1}

    def _receive(self, order: dict[str, Any]) -> None:
        assert self._tensors is not None
        assert self._group is not None
        dtypes = order.get("dtypes") or order["dtype_names"]
        for name, dtype, shape in zip(order["names"], dtypes, order["shapes"], strict=True):
            tensor = torch.empty(shape, dtype=getattr(torch, dtype))
            torch.distributed.broadcast(tensor, src=0, group=self._group)
            self._tensors[name] = tensor


class Handler(BaseHTTPRequestHandler):
    """One order."""

    receiver: Receiver

    def do_POST(self) -> None:
        order = json.loads(self.rfile.read(int(self.headers["content-length"])) or b"null")
        status, reply = self.receiver.answer(self.path, order or {})
        self._send(status, reply)

    def _send(self, status: int, reply: dict[str, Any]) -> None:
        body = json.dumps(reply).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        self._send(200, {"version": "0.5.23", **self.receiver.ranks})

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


def main(file: str) -> None:
    Handler.receiver = Receiver(file, {})
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    print(server.server_address[1], flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main(sys.argv[1])
