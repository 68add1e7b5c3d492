"""Import of optional packages that only some sources need (extras of stretto)."""

from __future__ import annotations

import importlib
from typing import Any

from stretto.core.errors import DataError, Problem


def package(name: str, extra: str, place: str) -> Any:
    """Import the module `name`, which comes with ``stretto[extra]``.

    Raises:
        DataError: the package is not installed, or cannot be imported.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        found = f"needs the package {name!r}, which cannot be imported ({error})"
        raise DataError([Problem(place, found, f"pip install 'stretto[{extra}]'")]) from None
