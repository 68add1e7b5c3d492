"""TCP keepalive for connections whose peer may vanish."""

from __future__ import annotations

import socket
import sys


def notice_silence(connected: socket.socket, seconds: int) -> None:
    """Enable TCP keepalive probes that close an idle connection after `seconds` without a response.

    A plain timeout would not do: a completion may take longer than a peer may be away.
    """
    asks = max(1, seconds // 4)
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if sys.platform == "linux":
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, asks)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, asks)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * seconds)
