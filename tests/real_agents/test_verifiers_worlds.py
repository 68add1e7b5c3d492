"""Promise: environments of verifiers, unchanged, are rolled out in sessions of the gateway, which has the tokens and
the versions of every turn, and in verifiers' own server, whose training client asks an engine for tokens."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from benchmarks.peers.environment import Environment, PeerUnavailable
from stretto.core.records import GenerateRequest, Sampling
from stretto.engine.config import EngineConfig
from stretto.engine.native.engine import NativeEngine
from stretto.model.hf.tokenizer import load_tokenizer
from tests.engine.openai_serving import build_byte_policy, generated, serve_cold
from tests.gateway.serving import in_a_loop, served_gateway
from tests.real_agents.running import PROGRAMS, ScoredModel, check_scores, run


@pytest.fixture(scope="module")
def verifiers() -> Path:
    try:
        return Environment("verifiers").ensure()
    except PeerUnavailable as problem:
        pytest.skip(f"verifiers cannot be installed: {problem}")


def script(prompt: str) -> str:
    """A call of the tool with the numbers of the question; then its result. One question in two is answered wrong."""
    if found := re.search(r"<tool_response>\n(\d+)", prompt):
        return f"It is {found[1]}."
    a, b = (int(number) for number in re.findall(r"(\d+)\+(\d+)\?", prompt)[0])
    if a % 2:
        return f'<tool_call>{{"name": "add", "arguments": {{"a": {a},  "b": {b}}}}}</tool_call>'
    return "I do not know."


@in_a_loop
async def test_rollouts_in_the_harness_of_one_process(verifiers: Path, tmp_path: Path) -> None:
    model = ScoredModel(script)
    async with served_gateway(model, tmp_path) as gateway:
        own = await gateway.open()
        rewards = json.loads(await run(verifiers, "verifiers_rollouts", session=own, home=tmp_path))
        assert rewards == [1.0, 0.0] * 4
        sessions = [one for one in gateway.app.sessions._by_id.values() if one.about]
        assert sorted((one.about["idx"], one.given.reward, one.state) for one in sessions) == [
            (idx, float(idx % 2), "ended") for idx in range(1, 9)
        ]
        for session in sessions:
            named = {"id": session.id, "api_key": session.key}
            shown: dict[str, Any] = await gateway.shown(named)
            assert shown["branches"] == {}
            assert len(shown["samples"]) == 1
            assert {version for node in shown["nodes"] for version in node["versions"]} == {3}
            await check_scores(gateway, named, model.vocabulary)


def test_a_rollout_in_their_server_has_the_engines_tokens(verifiers: Path, tmp_path: Path) -> None:
    folder = build_byte_policy(tmp_path / "bytes")
    with serve_cold(folder) as serving:
        words = [str(verifiers), str(PROGRAMS / "verifiers_server.py"), f"{serving.url}/v1", "bytes", str(folder)]
        told = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)
    assert told.returncode == 0, told.stderr[-3000:]
    tokens, mask, logprobs, reward = json.loads(told.stdout.splitlines()[-1])
    assert reward in (0.0, 1.0)
    prompt = tuple(token for token, sampled in zip(tokens, mask, strict=True) if not sampled)
    sampling = Sampling(max_tokens=24, temperature=0.8, stop_token_ids=load_tokenizer(folder).eos_token_ids)
    wanted = GenerateRequest(id="a", prompt_token_ids=prompt, seeds=(3,), sampling=sampling)
    completion = generated(NativeEngine.load(folder, EngineConfig()), wanted)[0]
    assert prompt + completion.token_ids == tuple(tokens)
    chosen = [logprob for logprob, sampled in zip(logprobs, mask, strict=True) if sampled]
    assert chosen == pytest.approx(completion.behavior_logprobs, abs=1e-5)
