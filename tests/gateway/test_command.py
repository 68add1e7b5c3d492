"""`stretto gateway` as users run it: a real process, sessions that survive its death, and engines that may die or be of
another make."""

import asyncio
import os
import signal
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from stretto.core.errors import RoleDied, UserError
from stretto.core.machine import Gpu
from stretto.model.hf.tokenizer import load_tokenizer
from stretto.processes.spawn import FreshSpawner, RunningProcess, Spawn
from stretto.processes.tree import descendants
from stretto_app.extensions.commands.gateway import gateway as serve_sessions
from tests.gateway.serving import build_chat_model
from tests.launch.running import service, wait_until
from tests.launch.vllm_server import Asked, replies_of, replies_that_say, replies_with_logprobs, serving
from tests.launch.warm import WarmCommand


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_chat_model(tmp_path_factory.mktemp("model") / "chatml")


@contextmanager
def gateway(model: Path, folder: Path, *words: str, poor: Sequence[str] = ()) -> Iterator[tuple[WarmCommand, str]]:
    """The command, and its address once it listens. `poor`: see `WarmCommand`."""
    begun, place = "gateway at ", f"--folder={folder}"
    with service("gateway", model, "--port", "0", place, *words, serving=begun, poor=poor) as (process, said):
        (line,) = (line for line in said if line.startswith(begun))
        yield process, line.removeprefix(begun).strip()


def words_of(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()


def ask(session: dict[str, str], address: str, *texts: str, timeout: float = 60, **further: Any) -> httpx.Response:
    messages = [{"role": ("user", "assistant")[at % 2], "content": text} for at, text in enumerate(texts)]
    body = {"model": "chatml", "messages": messages, "max_tokens": 12, **further}
    headers = {"Authorization": f"Bearer {session['api_key']}"}
    return httpx.post(f"{address}/v1/chat/completions", json=body, headers=headers, timeout=timeout)


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


def test_a_turn_outlives_its_engine(model: Path, tmp_path: Path) -> None:
    with gateway(model, tmp_path / "sessions") as (process, address):
        session = httpx.post(f"{address}/sessions", json={}).json()
        first = ask(session, address, "hello").json()["choices"][0]["message"]["content"]
        [engine] = (pid for pid in descendants(process.pid) if b"engine.role" in words_of(pid))
        os.kill(engine, signal.SIGSTOP)  # the turn is open when it dies, and when the gateway is asked to stop
        recorded = tmp_path / "sessions" / f"{session['id']}.jsonl"
        before = recorded.stat().st_size
        with ThreadPoolExecutor() as beside:
            turn = beside.submit(ask, session, address, "hello", first, "go on")
            wait_until(lambda: recorded.stat().st_size > before, "the turn begins")
            os.kill(engine, signal.SIGKILL)
            process.send_signal(signal.SIGTERM)
            assert turn.result(120).status_code == 200
        assert process.wait(60) == 0
        said = process.said()[0]
        assert "engine-0 was killed by SIGKILL" in said
        assert "stopping: open requests (1) have 30 s to finish; a second signal ends it now" in said


def test_an_engine_whose_event_loop_hangs_is_replaced_once_a_client_has_waited_for_long(
    model: Path, tmp_path: Path
) -> None:
    """And not the one beside it; see `tests/loop/test_nonsense.py` for the others' rule."""
    words = ("engine.count=2", "deadlines.answer=18", "deadlines.hung=2")
    with gateway(model, tmp_path / "sessions", *words, poor=("asleep", "3600")) as (process, address):
        sessions = [httpx.post(f"{address}/sessions", json={}).json() for _ in range(2)]
        engines = [pid for pid in descendants(process.pid) if b"engine.role" in words_of(pid)]
        began = time.monotonic()
        os.kill(engines[0], signal.SIGUSR1)

        def late(session: dict[str, str]) -> bool:
            with suppress(httpx.ReadTimeout):
                return ask(session, address, "hello", timeout=4).status_code != 200
            return True

        with ThreadPoolExecutor() as beside:  # of two quick requests the same engine may get both
            wait_until(lambda: any(beside.map(late, sessions)), "the engine is hit")
        assert all(ask(session, address, "hello").status_code == 200 for session in sessions)
        wait_until(lambda: [Path(f"/proc/{pid}").exists() for pid in engines] == [False, True], "its end, alone")
        assert time.monotonic() - began < 18, "the deadline of the turn"


def test_the_turns_of_a_server_of_another_make_are_on_record_as_it_sampled_them(model: Path, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(model)
    tokens = (*tokenizer.encode("ye", special_tokens=False), *tokenizer.encode("s", special_tokens=False))
    tokens = (*tokens, tokenizer.eos_token_ids[0])
    logprobs, asked = [-0.5 - at / 7 for at in range(len(tokens))], Asked()
    with serving(replies_of(model, context=512) | replies_that_say(tokens, logprobs), asked) as server:
        words = ("engine.kind=vllm", f'engine.addresses=["{server}"]')
        with gateway(model, tmp_path / "sessions", *words) as (process, address):
            session = httpx.post(f"{address}/sessions", json={}).json()
            reply = ask(session, address, "hello", response_format={"type": "json_object"}, top_p=0.5)
            assert reply.json()["choices"][0]["message"]["content"] == "yes"
            assert reply.headers["x-stretto-unapplied"] == "response_format"
            given, sampled = httpx.get(f"{address}/sessions/{session['id']}").json()["nodes"]
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0
    assert (tuple(sampled["token_ids"]), sampled["logprobs"]) == (tokens, logprobs)
    assert sampled["versions"] == [0] * len(tokens)
    *_, wanted = [body for path, body in asked if path == "/inference/v1/generate"]
    assert wanted["token_ids"] == given["token_ids"]
    assert wanted["sampling_params"]["top_p"] == 0.5
    [loaded] = [body["args"] for path, body in asked if path == "/collective_rpc"]
    assert loaded == [str(model)]


def test_a_server_whose_logprobs_ignore_what_clients_choose_is_refused_before_there_is_a_client(
    model: Path, tmp_path: Path
) -> None:
    with serving(replies_of(model, context=512) | replies_with_logprobs(raw=True)) as server:
        words = ["engine.kind=vllm", f'engine.addresses=["{server}"]']
        with pytest.raises(UserError, match=f"{server} reports .*_ORIGINAL_LOGPROB$"):  # clients choose
            serve_sessions(model, host="127.0.0.1", port=0, folder=tmp_path / "sessions", overrides=words)


def test_its_engines_have_a_gpu_each(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there = Gpu("0", "H100", 80 << 30, 20 << 30), Gpu("1", "H100", 80 << 30, 79 << 30)
    monkeypatch.setattr("stretto_app.extensions.commands.gateway.usable_gpus", lambda recipe: there)
    seen = set[str]()

    class Noted(FreshSpawner):
        async def start(self, spawn: Spawn) -> RunningProcess:
            seen.add(spawn.environment["CUDA_VISIBLE_DEVICES"])
            await asyncio.sleep(0.05)
            raise OSError("no room")

    with pytest.raises(RoleDied, match="no room"):
        serve_sessions(
            model,
            host="127.0.0.1",
            port=0,
            folder=tmp_path / "sessions",
            overrides=["engine.count=2"],
            spawner=Noted(),
        )
    assert seen == {"0", "1"}


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        *[({"host": "0.0.0.0"}, "give --api-key"), ({"api_key": "two words"}, "cannot be sent")],
        *[({"overrides": ["engine.slot=1"]}, "slots"), ({"overrides": ["engine.kind=vllm"]}, "engine.python: missing")],
        *[({"overrides": ["engine.port=1"]}, "engine.port"), ({"overrides": ["engine.base_port=1"]}, "give --port")],
        ({"overrides": ["trainer.steps=1"]}, "is no setting here"),
        ({"folder": Path(__file__) / "sessions"}, "cannot be made: Not a directory"),
    ],
)
def test_mistakes_are_told_before_a_model_loads(model: Path, tmp_path: Path, wrong: dict[str, Any], told: str) -> None:
    with pytest.raises(UserError, match=told):
        serve_sessions(model, **{"host": "127.0.0.1", "port": 0, "folder": tmp_path / "sessions", **wrong})
    assert not (tmp_path / "sessions").exists()
