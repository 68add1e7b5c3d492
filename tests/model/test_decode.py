"""Promises: the cached path computes what the plain transformers model computes, for every row, whatever the batch
holds, for full and sliding attention, with grouped heads, capped scores and experts.
"""

import copy
import dataclasses
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from stretto.model.decode.policy import CACHED_ATTENTION, Context, DecodePolicy
from tests.model.families import FAMILIES, VOCABULARY, config
from tests.tolerances import LOGITS, assert_close, operations_of, rounding

OPERATIONS = operations_of(config("qwen3", 2, 2))
EXACT = rounding(OPERATIONS, size=LOGITS)


def twins(
    family: str, heads: int, kv_heads: int, special: dict[str, Any] | None = None
) -> tuple[PreTrainedModel, DecodePolicy]:
    """The plain model and the cached path, with equal weights."""
    torch.manual_seed(0)
    shape = config(family, heads, kv_heads, special)
    plain = AutoModelForCausalLM.from_config(copy.deepcopy(shape), attn_implementation="eager").eval()
    driven = AutoModelForCausalLM.from_config(copy.deepcopy(shape), attn_implementation=CACHED_ATTENTION).eval()
    driven.load_state_dict(plain.state_dict())
    return plain, DecodePolicy(driven)


class Rows:
    """Rows of random tokens, fed to the policy and checked against the plain model."""

    def __init__(self, plain: PreTrainedModel, policy: DecodePolicy, rows: int = 16) -> None:
        self.plain, self.policy = plain, policy
        self.random = np.random.default_rng(0)
        self.tokens: dict[int, list[int]] = {}
        self.newest, self.lengths = np.zeros(rows, np.int64), np.zeros(rows, np.int64)

    def enter(self, length: int, *rows: int) -> Context:
        prompt = self.random.integers(2, VOCABULARY, length)
        for row in rows:
            self.tokens[row] = prompt.tolist()
        return Context(prompt[:-1], rows)

    def recompute(self) -> list[Context]:
        self.policy.clear()
        return [Context(np.array(tokens[:-1], np.int64), (row,)) for row, tokens in self.tokens.items()]

    def leave(self, row: int) -> None:
        self.policy.release(row)
        del self.tokens[row]

    def step(self, *contexts: Context) -> float:
        """One step; returns the largest difference of a log-probability from the plain model's."""
        for row, tokens in self.tokens.items():
            self.newest[row], self.lengths[row] = tokens[-1], len(tokens)
        order, logits = self.policy.forward(self.newest, self.lengths, contexts)
        self.policy.check_integrity()
        assert sorted(order.tolist()) == sorted(self.tokens)
        worst = 0.0
        for row, line in zip(order.tolist(), logits, strict=True):
            with torch.no_grad():
                expected = self.plain(torch.tensor([self.tokens[row]])).logits[0, -1]
            worst = max(worst, float((line.log_softmax(-1) - expected.log_softmax(-1)).abs().max()))
            self.tokens[row].append(int(self.random.integers(2, VOCABULARY)))
        return worst


@pytest.mark.parametrize(("family", "heads", "kv_heads", "special"), FAMILIES)
def test_every_row_has_the_logits_of_the_plain_model_through_growth_departure_and_recomputation(
    family: str, heads: int, kv_heads: int, special: dict[str, Any]
) -> None:
    rows = Rows(*twins(family, heads, kv_heads, special))
    experts = {"num_experts", "num_local_experts"} & special.keys()
    assert isinstance(rows.policy.forward_of_model, partial) is not bool(experts), "traced, but for experts"
    differences = [rows.step(rows.enter(58, 0, 1, 2), rows.enter(1, 3), rows.enter(20, 4), rows.enter(130, 5))]
    differences += [rows.step() for _ in range(8)]  # rows 0 to 2 outgrow their bucket of 64
    rows.leave(1)
    rows.leave(3)
    differences += [rows.step(rows.enter(7, 6, 7)), rows.step()]
    differences += [rows.step(*rows.recompute(), rows.enter(9, 8)), rows.step()]
    assert max(differences) < EXACT


def test_a_step_that_brings_rows_in_leaves_the_others_alone() -> None:
    rows = Rows(*twins("qwen3", 2, 2))
    rows.step(rows.enter(12, 0))
    newest, lengths = np.full(16, rows.tokens[0][-1]), np.full(16, len(rows.tokens[0]))
    _, alone = rows.policy.forward(newest, lengths, [])
    order, together = rows.policy.forward(newest, lengths, [rows.enter(int(lengths[0]), 1)])
    assert_close(together[order.tolist().index(0)], alone[0], OPERATIONS)


def test_bfloat16_follows_float32() -> None:
    _, policy = twins("qwen3", 4, 2)
    half = DecodePolicy(copy.deepcopy(policy.model).bfloat16())
    prompt = np.arange(2, 22)
    newest, lengths = np.full(1, prompt[-1]), np.full(1, len(prompt))
    _, exact = policy.forward(newest, lengths, [Context(prompt[:-1], (0,))])
    _, rounded = half.forward(newest, lengths, [Context(prompt[:-1], (0,))])
    assert rounded.dtype == torch.float32
    assert_close(rounded.softmax(-1), exact.softmax(-1), OPERATIONS, dtype=torch.bfloat16, size=1.0)


def test_a_layer_reads_no_further_back_than_its_window() -> None:
    rows = Rows(*twins("mistral", 2, 1, {"sliding_window": 10}))
    rows.step(rows.enter(50, 0), rows.enter(40, 1))
    bucket, _ = rows.policy._buckets.place_of(0)
    with torch.inference_mode():
        for held in (*bucket.keys, *bucket.values):
            held[..., :30, :] = torch.nan  # what both rows have left behind is never looked at again
    assert rows.step() < EXACT


def test_a_filler_passes_no_learned_position() -> None:
    """The filler has 25 tokens, and this OPT 16 positions."""
    learned = {"ffn_dim": 48, "word_embed_proj_dim": 32, "max_position_embeddings": 16}
    rows = Rows(*twins("opt", 2, 2, learned), rows=41)
    assert rows.step(*(rows.enter(15, row) for row in range(41))) < EXACT


def test_a_filler_is_one_context_whose_positions_change_no_bit() -> None:
    _, policy = twins("qwen3", 2, 2, {"max_position_embeddings": 16})
    newest, lengths = np.full(41, 3), np.full(41, 15)
    step, _ = policy._step(newest, lengths, [Context(np.arange(2, 16), (row,)) for row in range(41)])
    assert step.contexts is not None
    assert step.contexts.buckets == ((1, 25), (41, 14))
    plain = dataclasses.replace(step, positions=np.concatenate([*[np.arange(14)] * 41, np.arange(25), lengths - 1]))
    assert torch.equal(policy._logits(step, 41), policy._logits(plain, 41))
