"""Promise: the training client of verifiers, which is written for vLLM, gets from `stretto serve` the token ids and the
log-probabilities that the engine samples, unchanged."""

import json
import subprocess
from pathlib import Path

import pytest

from benchmarks.peers.environment import Environment, PeerUnavailable
from stretto.core.records import GenerateRequest, Sampling
from stretto.engine.config import EngineConfig
from stretto.engine.native.engine import NativeEngine
from stretto.model.hf.tokenizer import load_tokenizer
from tests.engine.byte_policy import build_byte_policy, generated
from tests.gateway.serve.serving import serve_cold

CLIENT = Path(__file__).with_name("verifiers_client.py")


def test_the_training_client_of_verifiers_gets_the_engines_tokens(tmp_path: Path) -> None:
    try:
        python = Environment("verifiers").ensure()
    except PeerUnavailable as problem:
        pytest.skip(f"verifiers cannot be installed: {problem}")
    folder = build_byte_policy(tmp_path / "bytes")
    with serve_cold(folder) as serving:
        words = [str(python), str(CLIENT), f"{serving.url}/v1", "bytes", str(folder)]
        told = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)
    assert told.returncode == 0, told.stderr
    prompt, tokens, logprobs = json.loads(told.stdout.splitlines()[-1])
    sampling = Sampling(max_tokens=24, temperature=0.8, stop_token_ids=load_tokenizer(folder).eos_token_ids)
    wanted = GenerateRequest(id="a", prompt_token_ids=tuple(prompt), seeds=(3,), sampling=sampling)
    completion = generated(NativeEngine.load(folder, EngineConfig()), wanted)[0]
    assert tuple(tokens) == completion.token_ids
    assert logprobs == pytest.approx(completion.behavior_logprobs, abs=1e-5)
