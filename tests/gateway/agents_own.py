"""Agents as users write them: functions of a task, and programs of one line."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any


def ask(*texts: str) -> str:
    """What the policy says to a conversation, by a client of ten lines."""
    messages = [{"role": ("user", "assistant")[at % 2], "content": text} for at, text in enumerate(texts)]
    body = json.dumps({"model": os.environ["OPENAI_MODEL"], "messages": messages}).encode()
    request = urllib.request.Request(f"{os.environ['OPENAI_BASE_URL']}/chat/completions", body)
    request.add_header("Authorization", f"Bearer {os.environ['OPENAI_API_KEY']}")
    with urllib.request.urlopen(request, timeout=30) as reply:
        return str(json.load(reply)["choices"][0]["message"]["content"])


def two_turns(task: dict[str, Any]) -> float:
    """Asks twice; the reward is the length of the last answer."""
    first = ask(task["prompt"])
    with Path(task["seen"]).open("a") as file:
        file.write(f"{first}\n")
    return float(len(ask(task["prompt"], first, "shorter")))


async def says_nothing(task: dict[str, Any]) -> float:
    return 1.0


def raises(task: dict[str, Any]) -> None:
    ask(task["prompt"])
    raise ValueError("no such luck")


def prints_its_address(task: dict[str, Any]) -> None:
    ask(task["prompt"])
    base = os.environ["OPENAI_BASE_URL"]
    sys.exit(f"no answer at http://127.0.0.1{base[base.index('/s/') :]}")


def gives_up(task: dict[str, Any]) -> float:
    """Takes an error of the gateway for a failure of its own."""
    try:
        ask(task["prompt"])
    except urllib.error.HTTPError as error:
        with Path(task["seen"]).open("a") as file:
            file.write(f"{error.code}\n")
    return 0.0


def hangs(task: dict[str, Any]) -> None:
    ask(task["prompt"])
    time.sleep(600)


def floods(task: dict[str, Any]) -> float:
    for _ in range(300):
        print("x" * 100_000)
    ask(task["prompt"])
    return 1.0


def forks(task: dict[str, Any]) -> float:
    """Leaves a process behind that hides in a session of its own."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    Path(task["seen"]).write_text(str(child.pid))
    ask(task["prompt"])
    return 1.0


def kills_its_guard(task: dict[str, Any]) -> None:
    """And leaves a process behind as `forks` does, which holds what it prints to."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    Path(task["seen"]).write_text(f"{child.pid} {os.getpid()}")
    ask(task["prompt"])
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(600)


def without_reward(task: dict[str, Any]) -> None:
    ask(task["prompt"])


def main(notes: Path) -> None:
    """A program: two turns, the first of which it notes; then it waits while there is a file "wait" beside the notes.
    The reward is the length of the last answer."""
    task = json.loads(os.environ["STRETTO_TASK"])
    first = ask(task["prompt"])
    with notes.open("a") as file:
        file.write(json.dumps([f"{task['id']}/{task['seed']}", first]) + "\n")
    while notes.with_name("wait").exists():
        time.sleep(0.02)
    last = ask(task["prompt"], first, "and?")
    body = json.dumps({"reward": float(len(last))}).encode()
    urllib.request.urlopen(urllib.request.Request(f"{os.environ['STRETTO_SESSION']}/reward", body), timeout=30).close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
