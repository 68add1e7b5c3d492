"""``python -m stretto_gateway.agents.call [--check] MODULE:FUNCTION``: an agent that is a Python function.

The function gets the task, and finds its session in the usual variables (OPENAI_BASE_URL, ANTHROPIC_BASE_URL and so
on). A number that it returns is the reward. With ``--check`` it is loaded and not called.
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

_SECONDS = 60.0


def function(place: str) -> Callable[[Any], Any]:
    """Load the function from a module in the working folder or an installed one; ends the process with a message if it
    is missing."""
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
    """Call the function once."""
    result = function(place)(json.loads(os.environ[TASK]))
    if inspect.iscoroutine(result):
        result = asyncio.run(result)
    if result is not None and not isinstance(result, int | float):
        sys.exit(f"{place} returned {type(result).__name__}, not a number")
    if result is not None:
        body = json.dumps({"reward": float(result)}).encode()
        request = urllib.request.Request(f"{os.environ[SESSION]}/reward", body)
        request.add_header("Authorization", f"Bearer {os.environ['OPENAI_API_KEY']}")
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        opener.open(request, timeout=_SECONDS).close()


if __name__ == "__main__":
    (function if sys.argv[1] == "--check" else main)(sys.argv[-1])
