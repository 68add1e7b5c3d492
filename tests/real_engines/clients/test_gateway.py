"""Promise: `stretto gateway` in front of a real server of another make: every token of a session has the
log-probability that the model gives it, behind exactly the tokens that are on record."""

import signal
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from stretto.model.hf.build import build_policy
from tests.launch.running import service
from tests.real_engines.scoring import TOLERANCE
from tests.real_engines.serving import MODEL, START_SECONDS, Installed

CHAT = "{% for m in messages %}{{ m.content }}={% endfor %}"


@pytest.fixture
def speaker(tmp_path: Path) -> Path:
    """A policy that takes chats."""
    build_policy(MODEL, tmp_path / "speaker", seed=5)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "speaker")
    tokenizer.chat_template = CHAT
    tokenizer.save_pretrained(tmp_path / "speaker")
    return tmp_path / "speaker"


def test_a_session_of_many_turns_scores_as_it_was_sampled(installed: Installed, speaker: Path, tmp_path: Path) -> None:
    words = (f"engine.kind={installed.kind}", f"engine.python={installed.python}", "engine.device=cpu")
    small = ("engine.cache_gib=0.25", "engine.slots=8", f"deadlines.start={START_SECONDS:g}")
    command = ("gateway", speaker, "--port", "0", "--folder", tmp_path / "sessions", *words, *small)
    with service(*command, serving="gateway at ", seconds=START_SECONDS) as (process, said):
        address = said[-1].removeprefix("gateway at ").strip()
        session = httpx.post(f"{address}/sessions", json={}).json()
        messages: list[dict[str, Any]] = [{"role": "user", "content": "1+2"}]
        for question in ("3+4", "5"):
            reply = httpx.post(
                f"{session['base_url']}/chat/completions",
                json={"model": "speaker", "messages": messages, "max_tokens": 40},
                timeout=120,
            )
            assert reply.status_code == 200, reply.text
            messages += [reply.json()["choices"][0]["message"], {"role": "user", "content": question}]
        shown = httpx.get(f"{address}/sessions/{session['id']}").json()
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    plain: Any = AutoModelForCausalLM.from_pretrained(speaker, dtype=torch.float32).eval()
    assert sum(node["sampled"] for node in shown["nodes"]) == 2
    for sample in shown["samples"]:
        nodes = [shown["nodes"][place] for place in sample]
        ids = torch.tensor([[token for node in nodes for token in node["token_ids"]]])
        with torch.no_grad():
            scores = plain(ids).logits[0, :-1].log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
        told = [logprob for node in nodes for logprob in node["logprobs"] or [None] * len(node["token_ids"])][1:]
        errors = [abs(float(score) - one) for score, one in zip(scores, told, strict=True) if one is not None]
        assert errors
        assert max(errors) < TOLERANCE
