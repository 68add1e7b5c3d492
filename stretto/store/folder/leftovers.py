"""Half-written files and folders that a kill has left; they are never read, and may be as large as a policy.

.NAME.part   .NAME.<pid>.part   .NAME.<pid>.partial      unfinished: `NAME` does not exist, or is older
.NAME.old    .NAME.<pid>.replaced                        whole: moved aside for its successor
"""

from __future__ import annotations

import contextlib
import re
import shutil
from collections.abc import Iterable
from pathlib import Path

_UNFINISHED = re.compile(r"\.(?P<name>.+?)(\.\d+)?\.(part|partial)")
_ASIDE = re.compile(r"\.(?P<name>.+?)(\.\d+)?\.(old|replaced)")


def sweep(folders: Iterable[Path]) -> None:
    """Remove leftovers of earlier processes from these folders; what was moved aside for a successor that never came
    gets its name back. The caller holds the run folder's lock.

    A leftover that cannot be removed stays: it does no harm.
    """
    for folder in folders:
        with contextlib.suppress(OSError):
            for path in list(folder.iterdir()):
                aside = _ASIDE.fullmatch(path.name)
                with contextlib.suppress(OSError):
                    if aside and not (folder / aside["name"]).exists():
                        path.rename(folder / aside["name"])
                    elif aside or _UNFINISHED.fullmatch(path.name):
                        _remove(path)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
