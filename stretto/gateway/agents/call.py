"""``python -m stretto.gateway.agents.call MODULE:FUNCTION``: an agent that is a Python function.

It gets the task, and finds its session where every client looks for it: in OPENAI_BASE_URL, ANTHROPIC_BASE_URL and so
on. A number that it returns is the reward.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import json
import os
import sys
import urllib.request

from stretto.gateway.agents.environment import SESSION, TASK

_SECONDS = 60.0


def main(place: str) -> None:
    """Call the function once."""
    module, _, name = place.partition(":")
    sys.path.insert(0, os.getcwd())
    result = getattr(importlib.import_module(module), name)(json.loads(os.environ[TASK]))
    if inspect.iscoroutine(result):
        result = asyncio.run(result)
    if result is not None:
        body = json.dumps({"reward": float(result)}).encode()
        request = urllib.request.Request(f"{os.environ[SESSION]}/reward", body)
        request.add_header("Authorization", f"Bearer {os.environ['OPENAI_API_KEY']}")
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        opener.open(request, timeout=_SECONDS).close()


if __name__ == "__main__":
    main(sys.argv[1])
