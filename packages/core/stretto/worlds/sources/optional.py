"""Packages that only some sources need: an extra of stretto, imported when a source asks for it."""

from __future__ import annotations

import importlib
from typing import Any

from stretto.core.errors import DataError, Problem


def package(name: str, extra: str, place: str) -> Any:
    """The module `name`, which comes with ``stretto[extra]``.

    Raises:
        DataError: it is not installed, or cannot be imported.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        found = f"needs the package {name!r}, which cannot be imported ({error})"
        raise DataError([Problem(place, found, f"pip install 'stretto[{extra}]'")]) from None
