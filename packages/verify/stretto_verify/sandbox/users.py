"""The users of root's sandboxes: each owns nothing, and no other sandbox on this machine has it.

Limits on processes are counted per user, so two sandboxes with one user would take each other's share.
"""

from __future__ import annotations

import os
import socket

_FIRST_UNUSED_UID = 60_000  # no system gives these to people or to its own services
_UNUSED_UIDS = 4_000


class SandboxUser:
    """The user of one sandbox. `uid` is None where we are not root: the guest stays who we are.

    Raises:
        OSError: all users are taken.
    """

    def __init__(self) -> None:
        self.uid: int | None = None
        self._claim: socket.socket | None = None
        if os.getuid() == 0:
            self.uid, self._claim = _claimed()

    def close(self) -> None:
        """Give the user back."""
        if self._claim is not None:
            self._claim.close()
            self._claim = None


def _claimed() -> tuple[int, socket.socket]:
    """The first free user, and what holds it: a name that the kernel frees with the process, however that ends."""
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
