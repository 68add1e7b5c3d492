"""An agent's program as its users start it, with a session of a gateway for its address; and a model that says what is
scripted, with the log-probabilities that a small real model gives it."""

import asyncio
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from stretto.core.forest import TurnRequest
from stretto.core.records import Segment
from tests.gateway.serving import MODEL, ScriptedModel, ServedGateway

PROGRAMS = Path(__file__).parent / "programs"
SECONDS = 60.0
TOLERANCE = 1e-4  # nats


@cache
def small_model(vocabulary: int) -> LlamaForCausalLM:
    """In float32, with distributions that are neither flat nor a point."""
    config = LlamaConfig(
        vocab_size=vocabulary, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=1 << 17, initializer_range=0.3,
    )  # fmt: skip
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(5)
        model = LlamaForCausalLM(config)
    model.eval()
    return model


def scored(vocabulary: int, before: Sequence[int], tokens: Sequence[int]) -> list[float]:
    """What the small model gives `tokens` behind those `before` them: log-probabilities at temperature 1."""
    ids = torch.tensor([[*before, *tokens]])
    with torch.no_grad():
        logits = small_model(vocabulary)(ids, logits_to_keep=len(tokens) + 1).logits[0, :-1]
    chosen: list[float] = logits.log_softmax(-1)[torch.arange(len(tokens)), ids[0, len(before) :]].tolist()
    return chosen


@dataclass
class ScoredModel(ScriptedModel):
    """A scripted model whose log-probabilities are those of the small model behind the prompts it was asked with."""

    script: Callable[[str], str] = field(default=lambda prompt: "")

    @property
    def vocabulary(self) -> int:
        return len(self.tokenizer.vocabulary)

    def _said(self, request: TurnRequest) -> Segment:
        said = super()._said(request)
        told = scored(self.vocabulary, request.prompt, said.token_ids)
        return Segment.of(said.token_ids, tuple(told), said.versions, stop_reason=said.stop_reason)


async def run(python: Path, program: str, *words: str, session: Mapping[str, str], home: Path) -> str:
    """The last line that the program printed."""
    home = home / "home"
    home.mkdir(exist_ok=True)
    openai = session["base_url"]
    own = {
        "OPENAI_BASE_URL": openai,
        "OPENAI_API_BASE": openai,
        "OPENAI_API_KEY": session["api_key"],
        "ANTHROPIC_BASE_URL": openai.removesuffix("/v1"),
        "ANTHROPIC_API_KEY": session["api_key"],
        "GATEWAY": openai.partition("/s/")[0],
        "MODEL": MODEL,
        "HOME": str(home),
    }
    kept = {name: value for name, value in os.environ.items() if "proxy" not in name.lower() and name != "PYTHONPATH"}
    process = await asyncio.create_subprocess_exec(
        str(python), str(PROGRAMS / f"{program}.py"), *words, env={**kept, **own}, cwd=home,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        output, problems = await asyncio.wait_for(process.communicate(), SECONDS)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == 0, problems.decode()[-3000:]
    return output.decode().strip().splitlines()[-1]


async def check_scores(gateway: ServedGateway, session: Mapping[str, str], vocabulary: int) -> None:
    """Every sampled token is in a sample, and has there the log-probability with which it was sampled."""
    shown: dict[str, Any] = await gateway.shown(dict(session))
    nodes = {node["id"]: node for node in shown["nodes"]}
    trained = set[int]()
    for sample in shown["samples"]:
        before: list[int] = []
        for node in (nodes[place] for place in sample):
            if node["sampled"]:
                again = scored(vocabulary, before, node["token_ids"])
                assert max(abs(a - b) for a, b in zip(again, node["logprobs"], strict=True)) < TOLERANCE
                trained.add(node["id"])
            before += node["token_ids"]
    assert trained == {node["id"] for node in shown["nodes"] if node["sampled"]}
