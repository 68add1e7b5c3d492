"""Promise: environments of verifiers, unchanged, are rolled out in sessions of the gateway, which has the tokens and
the versions of every turn; as a service they make the trajectories of a run, which trains on them; and in verifiers'
own server their training client asks an engine for tokens."""

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.peers.environment import Environment, PeerUnavailable
from stretto.core.records import GenerateRequest, Sampling
from stretto.engine.config import EngineConfig
from stretto.engine.native.engine import NativeEngine
from stretto.model.hf.tokenizer import load_tokenizer
from stretto.store.ledger.reading import read_batches
from stretto_report.audit.check import check_run
from stretto_report.reading.inspection import inspect_run
from tests.engine.byte_policy import build_byte_policy, generated
from tests.gateway.serve.serving import serve_cold
from tests.gateway.serving import build_chat_model, served_gateway
from tests.real_agents.running import PROGRAMS, ScoredModel, check_scores, run

ROOT = Path(__file__).parents[2]


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


RECIPE = """
seed = 1
[model]
path = "{folder}/model"
[task]
kind = "jsonl"
file = "{folder}/questions.jsonl"
held_out = 2
[workflow]
kind = "agent"
parallel = 16
[gateway]
port = {port}
[sampling]
max_tokens = 12
[rewards]
function = "exact_match"
[rollout]
batch_size = 2
group_size = 4
max_in_flight = 4
max_staleness = 1
[evaluation]
every = 0
[trainer]
steps = 3
"""


@pytest.mark.timeout(900)
def test_a_service_of_environments_makes_the_trajectories_of_a_run(verifiers: Path, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    config = build_chat_model(tmp_path / "model") / "config.json"
    config.write_text(config.read_text().replace('"max_position_embeddings": 512', '"max_position_embeddings": 2048'))
    (tmp_path / "recipe.toml").write_text(RECIPE.format(folder=tmp_path, port=port))
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    service = [str(verifiers), str(ROOT / "examples" / "agents" / "verifiers_service.py")]
    theirs = kept | {"PYTHONPATH": str(PROGRAMS), "HOME": str(tmp_path)}
    subprocess.run([*service, "questions", "verifiers_sums", str(tmp_path / "questions.jsonl")], env=theirs, check=True)
    serve = [*service, "serve", f"http://127.0.0.1:{port}", "verifiers_sums", "verifiers_sums"]
    train = [sys.executable, "-m", "stretto_app.cli.main", "train", "recipe.toml", "--run-dir", "run"]
    with subprocess.Popen(serve, env=theirs, stderr=subprocess.PIPE, text=True) as serving:
        try:
            told = subprocess.run(
                train,
                env=kept | {"PYTHONPATH": str(ROOT)},
                cwd=tmp_path,
                capture_output=True,
                text=True,
                timeout=600,
                check=False,
            )
            assert told.returncode == 0, told.stdout + told.stderr
            assert serving.wait(30) == 0, serving.stderr.read() if serving.stderr else ""
        finally:
            serving.kill()
    run = tmp_path / "run"
    assert check_run(run).kept
    assert inspect_run(run).trajectories.failed == 0
    for batch in read_batches(run / "ledger.sqlite", 0, 3):
        for trajectory in [one for group in batch.groups for one in group.trajectories]:
            assert trajectory.session
            assert trajectory.reward in (0.0, 1.0)
            assert trajectory.segments[-1].sampled
            assert set(trajectory.versions) <= set(range(batch.version + 1))


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
