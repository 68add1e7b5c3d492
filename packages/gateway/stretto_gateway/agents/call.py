"""Call of a Python function as an agent: ``python -m stretto_gateway.agents.call [--check] MODULE:FUNCTION``.

The function gets the task, a dict. Its session is in the environment variables that clients read (OPENAI_BASE_URL,
ANTHROPIC_BASE_URL and so on). A returned number is sent to the gateway as the reward. With ``--check`` the function is
only loaded.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import sys
import urllib.request
from collections.abc import Callable
from typing import Any

from stretto.core.errors import RecipeError
from stretto.doors.loading import load, look_in
from stretto_gateway.agents.environment import SESSION, TASK
from stretto_verify.models import opener

_SECONDS = 60.0


def function(place: str) -> Callable[[Any], Any]:
    """Load and return the function ``MODULE:FUNCTION`` from the working folder or the installed packages. Ends the
    process with a message if there is none, or it is not callable."""
    look_in(os.getcwd())
    try:
        found = load(place, "workflow.function", "agent", {})
    except RecipeError as error:
        (problem,) = error.problems
        sys.exit(f"{problem.found}; {problem.remedy}")
    if not callable(found):
        sys.exit(f"{place!r} is {type(found).__name__}, which cannot be called")
    agent: Callable[[Any], Any] = found
    return agent


def main(place: str) -> None:
    """Call the function ``MODULE:FUNCTION``, which may be async, once with the task, and send the number that it
    returns as the session's reward; for None nothing is sent. Task, session and key come from the environment. Ends the
    process with a message if the function returns anything else. Raises OSError if the gateway refuses the reward, or
    cannot be reached."""
    result = function(place)(json.loads(os.environ[TASK]))
    if inspect.iscoroutine(result):
        result = asyncio.run(result)
    if result is not None and not isinstance(result, int | float):
        sys.exit(f"{place} returned {type(result).__name__}, not a number")
    if result is not None:
        body = json.dumps({"reward": float(result)}).encode()
        request = urllib.request.Request(f"{os.environ[SESSION]}/reward", body)
        request.add_header("Authorization", f"Bearer {os.environ['OPENAI_API_KEY']}")
        opener(urllib.request.ProxyHandler({})).open(request, timeout=_SECONDS).close()


if __name__ == "__main__":
    (function if sys.argv[1] == "--check" else main)(sys.argv[-1])
