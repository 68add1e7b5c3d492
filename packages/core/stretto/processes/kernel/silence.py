"""Connections whose other end is gone without a word."""

from __future__ import annotations

import socket
import sys


def notice_silence(connected: socket.socket, seconds: int) -> None:
    """Have the kernel ask the other end while nothing comes, and give the connection up after `seconds`.

    Completions may take longer than a machine may be away.
    """
    asks = max(1, seconds // 4)
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if sys.platform == "linux":
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, asks)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, asks)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * seconds)
