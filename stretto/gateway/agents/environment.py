"""What an agent's program finds in its environment."""

from __future__ import annotations

from collections.abc import Mapping

TASK = "STRETTO_TASK"  #: the task as JSON
SESSION = "STRETTO_SESSION"  #: ``http://host:port/sessions/ID``, for the reward and the end
_OURS = "STRETTO_"
_LOOPBACK = "127.0.0.1,localhost,::1"


def environment_of(
    own: Mapping[str, str], address: str, session: str, key: str, model: str, task: str
) -> dict[str, str]:
    """The environment of the conductor without what is stretto's own, and the session under the names that clients
    know."""
    base = f"{address}/s/{key}"
    kept = {name: value for name, value in own.items() if not name.startswith(_OURS)}
    return kept | {
        "OPENAI_BASE_URL": f"{base}/v1",
        "OPENAI_API_BASE": f"{base}/v1",
        "OPENAI_API_KEY": key,
        "OPENAI_MODEL": model,
        "ANTHROPIC_BASE_URL": base,
        "ANTHROPIC_API_KEY": key,
        "ANTHROPIC_MODEL": model,
        "NO_PROXY": _LOOPBACK,
        "no_proxy": _LOOPBACK,
        SESSION: f"{address}/sessions/{session}",
        TASK: task,
    }
