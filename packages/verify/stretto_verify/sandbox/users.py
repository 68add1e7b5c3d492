"""User ids for sandboxes that root starts. Each is used by only one sandbox on this machine, and owns no file.

Process limits are counted per user, so two sandboxes with the same user would share one limit.
"""

from __future__ import annotations

import os
import socket

_FIRST_UNUSED_UID = 60_000  # not used for people or services by any system
_UNUSED_UIDS = 4_000


class SandboxUser:
    """User id of one sandbox. `uid` is None if this process is not root; the guest then keeps this process's user.

    Raises:
        OSError: all users are taken.
    """

    def __init__(self) -> None:
        self.uid: int | None = None
        self._claim: socket.socket | None = None
        if os.getuid() == 0:
            self.uid, self._claim = _claimed()

    def close(self) -> None:
        """Release the user id."""
        if self._claim is not None:
            self._claim.close()
            self._claim = None


def _claimed() -> tuple[int, socket.socket]:
    """First free user id, and the socket that reserves it: an abstract name that the kernel frees when the process
    ends."""
    for number in range(_UNUSED_UIDS):
        uid = _FIRST_UNUSED_UID + (os.getpid() + number) % _UNUSED_UIDS
        claim = socket.socket(socket.AF_UNIX)
        try:
            claim.bind(f"\0stretto-sandbox-user-{uid}")
        except OSError:
            claim.close()
        else:
            return uid, claim
    raise OSError("all users for sandboxes are taken")
