"""One turn through the training client of verifiers, in its own environment: URL MODEL TOKENIZER; prints the tokens."""

import asyncio
import json
import sys

from verifiers.v1.clients.train import TrainClient
from verifiers.v1.configs.client import TrainClientConfig
from verifiers.v1.dialects import ChatDialect
from verifiers.v1.types import SamplingConfig


async def main(url: str, model: str, tokenizer: str) -> None:
    client = TrainClient(TrainClientConfig(base_url=url, renderer_model_name=tokenizer))
    body = {"model": model, "messages": [{"role": "user", "content": "the cat"}]}
    sampling = SamplingConfig(temperature=0.8, max_tokens=24, seed=3)
    reply = await client.get_response(ChatDialect(), body, sampling, session_id="trace-1")
    tokens = reply.tokens
    print(json.dumps([tokens.prompt_ids, tokens.completion_ids, tokens.completion_logprobs]))


asyncio.run(main(*sys.argv[1:]))
