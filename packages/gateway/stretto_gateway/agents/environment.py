"""Environment variables that an agent's program gets."""

from __future__ import annotations

from collections.abc import Mapping
from urllib.parse import urlsplit

TASK = "STRETTO_TASK"  #: the task as JSON
SESSION = "STRETTO_SESSION"  #: ``http://host:port/sessions/ID``, where the program sends its reward and its end
_OURS = "STRETTO_"
_LOOPBACK = ("127.0.0.1", "localhost", "::1")
_ANYWHERE = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]"}  # addresses to listen on, and to connect to in their place
_NO_PROXY = ("NO_PROXY", "no_proxy")


def environment_of(
    own: Mapping[str, str], address: str, session: str, key: str, model: str, task: str
) -> dict[str, str]:
    """Make the environment of an agent's program, which reaches the gateway without a proxy.

    Args:
        own: environment of the conductor; its variables are kept, except those that begin with ``STRETTO_``.
        address: address of the gateway, ``http://host:port``; the address of all interfaces becomes the loopback one.
        session, key: id and key of the session, which go into the variables that clients of OpenAI and Anthropic read.
        model: name of the served model.
        task: the task as JSON.
    """
    for everywhere, loopback in _ANYWHERE.items():
        address = address.replace(f"//{everywhere}:", f"//{loopback}:")
    base = f"{address}/s/{key}"
    direct = [host for name in _NO_PROXY for host in own.get(name, "").split(",")]
    direct_hosts = ",".join(dict.fromkeys(filter(None, [*direct, *_LOOPBACK, urlsplit(address).hostname or ""])))
    kept = {name: value for name, value in own.items() if not name.startswith(_OURS)}
    return kept | {
        "OPENAI_BASE_URL": f"{base}/v1",
        "OPENAI_API_BASE": f"{base}/v1",
        "OPENAI_API_KEY": key,
        "OPENAI_MODEL": model,
        "ANTHROPIC_BASE_URL": base,
        "ANTHROPIC_API_KEY": key,
        "ANTHROPIC_MODEL": model,
        **dict.fromkeys(_NO_PROXY, direct_hosts),
        SESSION: f"{address}/sessions/{session}",
        TASK: task,
    }
