"""The log of a role whose code is a user's: what prints without end must not fill the disk."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

_MOST_BYTES = 8 << 20  # beyond them the newer half is dropped


def cut_log(log: Path) -> None:
    """Cut a log that has grown too long, and say so in it."""
    with contextlib.suppress(OSError):  # an unwritable log is reported at the start of a role
        if log.stat().st_size > _MOST_BYTES:
            os.truncate(log, _MOST_BYTES // 2)
            with log.open("a") as end:
                end.write(f"\n[output cut after {_MOST_BYTES >> 21} MiB]\n")
