"""Checks before a gateway starts."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys

from stretto.core.errors import ModelFolderError, Problem, RecipeError, WorkflowError
from stretto.launch.recipe.extensions import AgentConfig
from stretto.processes.http.asgi import is_loopback
from stretto_workflows.chat.bridge import ChatTemplate

_IMPORT_SECONDS = 60.0
KEY = "STRETTO_API_KEY"  #: environment variable with the key that opens sessions
_SENDABLE = re.compile(r"[!-~]+")


def check_key(api_key: str | None, place: str) -> None:
    """Check that an HTTP header can hold the key; None is allowed. `place`: option or variable with the key, for the
    error message.

    Raises:
        RecipeError: it has other characters, so that no client could send it.
    """
    if api_key is not None and not _SENDABLE.fullmatch(api_key):
        raise RecipeError([Problem(place, "cannot be sent", "letters, digits and signs of ASCII, without spaces")])


def check_reach(bound: socket.socket, api_key: str | None, place: str) -> None:
    """Check that `api_key` is set (not None) if a bound socket can be reached from other machines. `place`: key or
    option with its address, for the error message.

    Raises:
        RecipeError: no key is set; the socket has been closed.
    """
    if api_key is None and not is_loopback(bound):
        found = f"{bound.getsockname()[0]} lets other machines open sessions without a key"
        bound.close()
        raise RecipeError([Problem(place, found, f"give --api-key or {KEY}, or listen on 127.0.0.1")])


def check_chat(tokenizer: ChatTemplate, place: str) -> None:
    """Check that a tokenizer has a chat template. `place`: folder of the model, for the error message.

    Raises:
        ModelFolderError: the tokenizer has none.
    """
    if not tokenizer.chat_template:
        remedy = "agents send messages: choose a model whose tokenizer has one"
        raise ModelFolderError([Problem(place, "the tokenizer has no chat template", remedy)])


def check_agent(config: AgentConfig, tokenizer: ChatTemplate, place: str) -> None:
    """Check that the agent can be started: its program exists, or its function can be loaded in another process, which
    this starts. An agent that is an external service has neither. `place`: folder of the model, for the error message.

    Raises:
        WorkflowError: the agent cannot be started, for the reason that the error names, or has both.
        ModelFolderError: the tokenizer has no chat template.
    """
    problems = []
    if config.command and config.function is not None:
        problems.append(Problem("workflow", "has a command and a function", "give one of them"))
    elif config.command and _program(config) is None:
        problems.append(Problem("workflow.command", f"{config.command[0]!r} is no program that can be started"))
    elif config.function is not None and not all(config.function.partition(":")):
        problems.append(Problem("workflow.function", repr(config.function), "'package.module:function' is needed"))
    elif config.function is not None and (missing := _missing(config.function, config.path)):
        problems.append(Problem("workflow.function", f"{config.function!r} cannot be called: {missing}"))
    if problems:
        raise WorkflowError(problems)
    check_chat(tokenizer, place)


def _missing(function: str, folder: str | None) -> str:
    """Load the function in another process, in `folder` (None: here); returns why that failed, "" if it worked."""
    command = (sys.executable, "-m", "stretto_gateway.agents.call", "--check", function)
    try:
        found = subprocess.run(
            command,
            cwd=folder,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=_IMPORT_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"its module took more than {_IMPORT_SECONDS:g} s to be imported"
    said = found.stderr.strip().splitlines() or [f"exit code {found.returncode}"]
    return said[-1] if found.returncode else ""


def _program(config: AgentConfig) -> str | None:
    """Path of the agent's program, None if there is none. A bare name is looked up in `PATH`; a name with a folder
    (``./agent.sh``) is relative to `workflow.path`, or without that to the working folder of this process."""
    name = config.command[0]
    return shutil.which(os.path.join(config.path or "", name) if os.path.dirname(name) else name)
