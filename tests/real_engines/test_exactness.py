"""Promise: every token of a real server has the log-probability that the weights of its version give it.

16 completions are in flight when three updates come. Each token is scored again by transformers in float32, to 1e-4:

- "recompute": under its version alone, prompt and all tokens before it included;
- "keep": over the cache that the versions before have left, which is how it was sampled;
- under a temperature that is not 1, and, by vLLM, in the renormalised distribution of top_k and top_p."""

from collections.abc import Callable
from itertools import cycle, pairwise
from typing import Any

import numpy as np
import pytest
import torch

from stretto.core.records import GenerateRequest, Sampling
from tests.real_engines import scoring
from tests.real_engines.scoring import TOLERANCE
from tests.real_engines.serving import RealServer, Run

LENGTH = 900
FILTERS = ({"top_p": 0.8}, {"top_k": 5}, {"temperature": 1.3, "top_k": 9, "top_p": 0.7})


def wanted(*sampling: dict[str, Any]) -> list[GenerateRequest]:
    """Four prompts of several lengths, each sampled in one of the ways; four completions of each, none of which ends
    early."""
    random = np.random.default_rng(7)
    return [
        GenerateRequest(
            id=f"r{number}",
            prompt_token_ids=tuple(random.integers(2, 22, length).tolist()),
            seeds=tuple(range(10 * number, 10 * number + 4)),
            sampling=Sampling(max_tokens=LENGTH, **way),
        )
        for (number, length), way in zip(enumerate((1, 5, 12, 30)), cycle(sampling), strict=False)
    ]


def errors(
    run: Run, requests: list[GenerateRequest], score: Callable[..., torch.Tensor]
) -> dict[tuple[str, int], torch.Tensor]:
    by_id = {request.id: request for request in requests}
    return {(c.request, c.member): score(run.models, by_id[c.request], c) for c in run.completions}


def assert_whole(run: Run) -> None:
    """Sixteen completions of all their tokens, whose versions never go back."""
    assert len({(c.request, c.member) for c in run.completions}) == len(run.completions) == 16
    for completion in run.completions:
        assert len(completion.token_ids) == len(completion.behavior_logprobs) == len(completion.versions) == LENGTH
        assert all(before <= after for before, after in pairwise(completion.versions))


def test_after_recomputing_updates_every_token_has_the_logprob_of_its_version(server: RealServer) -> None:
    """At two temperatures. By the weights of another version it is far from that."""
    requests = wanted({"temperature": 1.0}, {"temperature": 0.7})
    run = server.updated_amid(requests, "recompute")
    assert_whole(run)
    assert max(float(found.max()) for found in errors(run, requests, scoring.recomputed).values()) < TOLERANCE
    assert all(completion.interrupted >= len(set(completion.versions)) - 1 for completion in run.completions)
    swapped = Run(run.completions, dict(zip(run.models, reversed(run.models.values()), strict=True)))
    assert min(float(found.max()) for found in errors(swapped, requests, scoring.recomputed).values()) > 0.01


def test_after_updates_that_keep_the_cache_every_token_has_the_logprob_it_was_sampled_with(server: RealServer) -> None:
    requests = wanted({})
    run = server.updated_amid(requests, "keep")
    assert_whole(run)
    assert max(float(found.max()) for found in errors(run, requests, scoring.kept).values()) < TOLERANCE
    alone = errors(run, requests, scoring.recomputed)
    for completion in run.completions:
        found = alone[completion.request, completion.member]
        first = completion.versions.count(completion.versions[0])
        assert found[:first].max() < TOLERANCE
        assert found[first:].max() > 100 * TOLERANCE, "the versions are too alike for this test"


@pytest.mark.parametrize("installed", ["vllm"], indirect=True)
def test_the_logprobs_of_vllm_are_of_the_renormalised_distribution(server: RealServer) -> None:
    """SGLang's ignore the filters, which is why they are refused there."""
    requests = wanted(*FILTERS)
    found = errors(server.updated_amid(requests, "recompute", updates=1), requests, scoring.recomputed)
    # Where probabilities add up to top_p within rounding, either side may keep one token more.
    for request in requests:
        own = torch.cat([found[request.id, member] for member in range(len(request.seeds))])
        assert float((own < TOLERANCE).double().mean()) > 0.999, request.sampling
