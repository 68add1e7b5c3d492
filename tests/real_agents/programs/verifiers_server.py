"""One rollout in verifiers' own environment server, with its training client: URL MODEL TOKENIZER; tells its tokens."""

import asyncio
import json
import sys

from verifiers.v1.clients import TrainClientConfig
from verifiers.v1.serve.client import EnvClient
from verifiers.v1.serve.server import EnvServer
from verifiers.v1.types import SamplingConfig
from verifiers.v1.utils.loaders import resolve_env_config

ENVIRONMENT = {
    "taskset": {"id": "verifiers_sums"},
    "agent": {"harness": {"id": "verifiers_sums", "env": {"plain": "1"}}, "runtime": {"type": "subprocess"}},
}


async def main(url: str, model: str, tokenizer: str) -> None:
    server = EnvServer(resolve_env_config(ENVIRONMENT), address="tcp://127.0.0.1:0")
    serving = asyncio.create_task(server.run())
    client = EnvClient(server.address)
    await client.wait_for_server_startup()
    episode = await client.run(
        client=TrainClientConfig(base_url=url, renderer_model_name=tokenizer),
        model=model,
        sampling=SamplingConfig(temperature=0.8, max_tokens=24, seed=3),
        task_data={"idx": 1, "prompt": "1+2?", "answer": "3"},
    )
    [trace] = episode.traces
    assert trace.ok, trace.errors
    [branch] = trace.branches
    print(json.dumps([branch.token_ids, branch.sampled_mask, branch.logprobs, trace.reward]))
    await client.close()
    serving.cancel()


asyncio.run(main(*sys.argv[1:]))
