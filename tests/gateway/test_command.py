"""`stretto gateway` as users run it: a real model, a real process, and sessions that survive its death."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from stretto.core.errors import UserError
from stretto.launch.commands.gateway import gateway as serve_sessions
from tests.gateway.serving import build_chat_model
from tests.launch.running import service
from tests.launch.warm import WarmCommand


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_chat_model(tmp_path_factory.mktemp("model") / "chatml")


@contextmanager
def gateway(model: Path, folder: Path, *words: str) -> Iterator[tuple[WarmCommand, str]]:
    """The command, and its address once it listens."""
    begun = "gateway at "
    with service("gateway", model, "--port", "0", "--folder", folder, *words, serving=begun) as (process, said):
        (line,) = (line for line in said if line.startswith(begun))
        yield process, line.removeprefix(begun).strip()


def ask(session: dict[str, str], address: str, *texts: str) -> httpx.Response:
    messages = [{"role": ("user", "assistant")[at % 2], "content": text} for at, text in enumerate(texts)]
    body = {"model": "chatml", "messages": messages, "max_tokens": 12}
    headers = {"Authorization": f"Bearer {session['api_key']}"}
    return httpx.post(f"{address}/v1/chat/completions", json=body, headers=headers, timeout=60)


def test_recorded_turns_answer_after_the_process_was_killed(model: Path, tmp_path: Path) -> None:
    with gateway(model, tmp_path / "sessions") as (process, address):
        session = httpx.post(f"{address}/sessions", json={"task": {"question": "1+2"}}).json()
        assert session["base_url"] == f"{address}/s/{session['api_key']}/v1"
        first = ask(session, address, "hello")
        assert first.status_code == 200, first.text
        text = first.json()["choices"][0]["message"]["content"]
        process.send_signal(signal.SIGKILL)
        process.wait(60)
    with gateway(model, tmp_path / "sessions") as (process, address):
        assert ask(session, address, "hello").content == first.content
        assert ask(session, address, "hello", text, "go on").status_code == 200
        shown = httpx.get(f"{address}/sessions/{session['id']}").json()
        assert shown["samples"] == [[0, 1, 2, 3]]
        assert [len(node["logprobs"]) for node in shown["nodes"][1::2]] == [
            len(node["token_ids"]) for node in shown["nodes"][1::2]
        ]
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"host": "0.0.0.0"}, "give --api-key"),
        ({"api_key": "two words"}, "cannot be sent"),
        ({"overrides": ["engine.slot=1"]}, "slots"),
    ],
)
def test_mistakes_are_told_before_the_model_is_loaded(
    model: Path, tmp_path: Path, wrong: dict[str, Any], told: str
) -> None:
    with pytest.raises(UserError, match=told):
        serve_sessions(model, **{"host": "127.0.0.1", "port": 0, "folder": tmp_path / "sessions", **wrong})
    assert not (tmp_path / "sessions").exists()
