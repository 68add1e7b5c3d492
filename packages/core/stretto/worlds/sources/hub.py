"""Reachability of the Hugging Face hub.

Without a network its library retries for half a minute. So the address is tried first, with a deadline; if nothing
answers, the library is set to use its cache only.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from stretto.processes.http.reach import unreachable
from stretto.worlds.sources.optional import package


@contextmanager
def reachable_or_cached(place: str) -> Iterator[str]:
    """Context manager: try to reach the hub, and if it does not reply, set the Hugging Face libraries to use only their
    cache within the block. Yields why the hub cannot be used, or "" if it replies.

    Raises:
        DataError: the libraries are not installed.
    """
    constants, config = package("huggingface_hub.constants", "data", place), package("datasets.config", "data", place)
    if constants.HF_HUB_OFFLINE:
        yield "HF_HUB_OFFLINE is set"
        return
    if not (fault := _fault(constants.ENDPOINT)):
        yield ""
        return
    before = config.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = config.HF_HUB_OFFLINE = True
    try:
        yield f"the hub at {constants.ENDPOINT} cannot be reached ({fault})"
    finally:
        constants.HF_HUB_OFFLINE, config.HF_HUB_OFFLINE = False, before


def _fault(address: str) -> str:
    """Why nothing answers at an address, or at the proxy that is set for it; "" if something answers."""
    parts = urlsplit(address)
    passed_by = proxy_bypass(parts.hostname or "")
    proxy = None if passed_by else getproxies().get(parts.scheme)
    return unreachable(proxy or address)
