"""Promise: whatever a client does in a session, every token that was sampled for it is trained once, in a sample of the
trainer's own, where the weights of its version give it the log-probability with which it was sampled."""

import asyncio
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from stretto.core.records import Batch, Group, Outcome, Prompt, Sampling, Trajectory, Verdict
from stretto.engine.config import EngineConfig
from stretto.engine.native.engine import NativeEngine
from stretto.launch.recipe.extensions import AgentConfig
from stretto.model.hf.folder import quiet_transformers
from stretto.model.hf.tokenizer import load_tokenizer
from stretto.trainer.batch.samples import Sample, samples_of
from stretto.trainer.objective.algorithm import AlgorithmConfig
from stretto_gateway.agents.groups import AgentGroups, AgentServices, WaitingSessions
from stretto_gateway.app import serving_beside
from stretto_gateway.model import ServedModel
from stretto_gateway.requests import SamplingRule
from stretto_gateway.sessions.app import GatewayApp
from stretto_gateway.sessions.sessions import SessionTable
from stretto_workflows.sessions import sessions_of_evaluation
from tests.engine.answering import shaken, weights
from tests.engine.serving import served
from tests.gateway.serving import MODEL, build_chat_model

TOLERANCE = 1e-4  # nats, in float32
LONGEST, BEFORE_UPDATE = 24, 5  # tokens
PROMPT = Prompt("17", (), "1+2?", "3")
ASK = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "1+2?"}]
MORE = {"role": "user", "content": "and?"}


class Policy:
    """An engine of this process with the versions of its weights, and a run's gateway in front of it."""

    def __init__(self, folder: Path) -> None:
        with quiet_transformers():
            plain = AutoModelForCausalLM.from_pretrained(build_chat_model(folder), dtype=torch.float32)
        self.models: dict[int, PreTrainedModel] = {0: plain.eval(), 1: shaken(plain, 1)}
        self.engine = NativeEngine.load(folder, EngineConfig(slots=2))
        self._socket, self._tokenizer = folder / "engine", load_tokenizer(folder)

    def update(self, version: int) -> None:
        self.engine.update(version, weights(self.models[version]))

    async def _unscored(self, prompt: str, completions: Sequence[str], answer: str) -> Sequence[Verdict]:
        pytest.fail("the client gives the rewards")

    @asynccontextmanager
    async def groups(self) -> AsyncIterator[AgentGroups]:
        table, host, tokenizer = SessionTable(), WaitingSessions(), self._tokenizer
        sampling = Sampling(max_tokens=LONGEST, stop_token_ids=tokenizer.eos_token_ids)
        model = ServedModel(MODEL, tokenizer, SamplingRule(sampling, self.engine.longest_row, chosen=()))
        app = GatewayApp(table, host, model)
        bound = socket.create_server(("127.0.0.1", 0))
        async with served(self.engine, self._socket) as engine, serving_beside(app, bound) as address:
            services = AgentServices(
                table=table,
                model=model,
                address=address,
                room=asyncio.Semaphore(2),
                score=self._unscored,
                verdict=lambda reward: Verdict(Outcome.RIGHT, reward),
                decode=tokenizer.decode,
                task=lambda prompt, member, seed: {"prompt": prompt.text},
            )
            opened = sessions_of_evaluation(engine.generate, lambda completion: None)
            yield AgentGroups(AgentConfig(kind="agent"), services, opened, host)


class Client:
    """Of one session, with nothing but HTTP; counts the tokens that it was told of."""

    def __init__(self, http: httpx.AsyncClient, session: dict[str, Any]) -> None:
        self._http, self._session, self.sampled = http, session, 0

    async def ask(self, *messages: Any) -> dict[str, Any]:
        body = {"model": MODEL, "messages": messages}
        headers = {"x-stainless-retry-count": "0"}
        reply = await self._http.post(f"{self._session['base_url']}/chat/completions", json=body, headers=headers)
        told = reply.json()
        self.sampled += told["usage"]["completion_tokens"]
        return dict(told["choices"][0]["message"])

    async def end(self, reward: float) -> None:
        place = f"/sessions/{self._session['id']}"
        await self._http.post(f"{place}/reward", json={"reward": reward})
        await self._http.post(f"{place}/end")


def rescored(sample: Sample, version: int, models: dict[int, PreTrainedModel]) -> float:
    """The largest difference between a loss token's log-probability and that by the plain model of its version."""
    ids = torch.tensor([list(sample.token_ids)])
    with torch.no_grad():
        by_version = {number: model(ids).logits[0].float().log_softmax(-1) for number, model in models.items()}
    return max(
        abs(float(by_version[version - age][at - 1, sample.token_ids[at]]) - float(logprob))
        for at, logprob, age in zip(sample.loss_positions, sample.behavior_logprobs, sample.staleness, strict=True)
    )


async def test_every_sampled_token_is_trained_once_and_scores_as_it_was_sampled(tmp_path: Path) -> None:
    policy = Policy(tmp_path / "model")

    async def updated_in_mid_turn() -> None:
        sampled = policy.engine.health().generated
        while policy.engine.health().generated < sampled + BEFORE_UPDATE:
            await asyncio.sleep(0)
        policy.update(1)

    async with policy.groups() as groups, httpx.AsyncClient(base_url=groups.services.address, timeout=30) as http:
        trajectories: list[Trajectory] = []
        clients: list[Client] = []
        for number, reward in enumerate((1.0, 0.0)):
            member = asyncio.create_task(groups.member(f"0.17.0/{number}", PROMPT, number, 5 + number))
            while (opened := await http.post("/sessions", json={})).status_code != 200:
                await asyncio.sleep(0.01)
            client = Client(http, opened.json())
            first = await client.ask(*ASK)
            second, _ = await asyncio.gather(client.ask(*ASK, first, MORE), updated_in_mid_turn())
            await client.ask(*ASK, first, MORE, second, MORE)  # behind tokens of both versions
            await client.ask(*ASK, first, {"role": "user", "content": "or?"})  # another message behind the first answer
            await client.ask(*ASK, {**first, "content": "three"}, MORE)  # an answer in other words
            await client.ask({"role": "user", "content": "sum it up"})  # another conversation
            await client.ask(*ASK)  # the first one again
            await client.end(reward)
            trajectories.append(await member)
            clients.append(client)

    segments = [segment for one in trajectories for segment in one.segments if segment.sampled]
    assert {tuple(sorted(set(segment.versions))) for segment in segments} == {(0,), (0, 1), (1,)}
    batch = Batch(3, 1, (Group("0.17.0", PROMPT, 0, tuple(trajectories)),))
    found = samples_of(batch, AlgorithmConfig(), LONGEST)
    assert found.masked_tokens == 0
    assert len(found.samples) == 2 * 5  # paths: the first conversation and four branches
    trained = sum(len(sample.loss_positions) for sample in found.samples)
    assert trained == sum(len(segment.token_ids) for segment in segments) == sum(one.sampled for one in clients)
    assert max(rescored(sample, batch.version, policy.models) for sample in found.samples) < TOLERANCE
    assert all(sample.prompt_tokens == 0 < sample.loss_positions[0] for sample in found.samples)
