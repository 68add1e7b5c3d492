"""Promises: steps by table give the logits of steps by bucket, whatever enters, grows over its bucket, leaves or is
computed again, with the weights of the moment; steps without contexts are captured once for each bucket of rows.

On a GPU the steps by table are those of a policy there, with CUDA graphs; elsewhere Triton's interpreter runs the
kernels, and a graph is a function that is called again.
"""

import copy
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from stretto.model.attention_support import check_attention
from stretto.model.decode.policy import CACHED_ATTENTION, Context, DecodePolicy
from stretto.model.decode.slot_tables import TableSteps
from stretto_kernels.steps.fusing import KERNELS
from stretto_kernels.steps.trace import trace
from tests.model.families import SLIDING, VOCABULARY, config
from tests.model.test_cuda_graphs import Again
from tests.tolerances import LOGITS, operations_of, rounding

pytest.importorskip("triton")

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
KINDS: list[Any] = [
    ("qwen3", 4, 2, {}),
    pytest.param(
        *("gemma2", 2, 1, {"sliding_window": 9, "layer_types": SLIDING, "attn_logit_softcapping": 0.5}),
        marks=pytest.mark.long,
    ),
]

OPERATIONS = operations_of(config("qwen3", 4, 2))
EXACT = rounding(OPERATIONS, size=LOGITS)


class Both:
    """One model by bucket and by table, and rows of random tokens that are fed to both."""

    def __init__(self, family: str, heads: int, kv_heads: int, special: dict[str, Any], kind: torch.dtype) -> None:
        torch.manual_seed(0)
        made = AutoModelForCausalLM.from_config(
            config(family, heads, kv_heads, special), attn_implementation=CACHED_ATTENTION
        )
        model = made.requires_grad_(False).eval().to(kind)
        self.bucketed, self.tabled = DecodePolicy(model), DecodePolicy(copy.deepcopy(model).to(DEVICE))
        assert self.bucketed.table_steps is None
        self.capture = Again()
        if DEVICE.type == "cpu":
            windows = check_attention(model).windows
            self.tabled.table_steps = TableSteps(self.tabled.layout, windows, self.capture, programs=6)
            self.tabled.forward_of_model = trace(self.tabled.model, KERNELS)
        assert self.tabled.table_steps is not None
        self.chance = np.random.default_rng(0)
        self.tokens: dict[int, list[int]] = {}

    def enter(self, length: int, *rows: int) -> Context:
        prompt = self.chance.integers(0, VOCABULARY, length)
        self.tokens |= {row: prompt.tolist() for row in rows}
        return Context(prompt[:-1], rows)

    def leave(self, row: int) -> None:
        del self.tokens[row]
        self.bucketed.release(row)
        self.tabled.release(row)

    def recompute(self) -> list[Context]:
        self.bucketed.clear()
        self.tabled.clear()
        return [Context(np.array(tokens[:-1], np.int64), (row,)) for row, tokens in self.tokens.items()]

    def step(self, *contexts: Context) -> float:
        """One step of both; returns the largest difference of a log-probability."""
        newest, lengths = np.zeros(16, np.int64), np.zeros(16, np.int64)
        for row, tokens in self.tokens.items():
            newest[row], lengths[row] = tokens[-1], len(tokens)
        order, expected = self.bucketed.forward(newest, lengths, contexts)
        same, found = self.tabled.forward(newest, lengths, contexts)
        assert order.tolist() == same.tolist()
        assert found.dtype == torch.float32
        for tokens in self.tokens.values():
            tokens.append(int(self.chance.integers(0, VOCABULARY)))
        return float((found.cpu().log_softmax(-1) - expected.log_softmax(-1)).abs().max())


@pytest.mark.parametrize(("family", "heads", "kv_heads", "special"), KINDS)
def test_logits_are_those_of_steps_by_bucket_through_growth_departure_and_recomputation(
    family: str, heads: int, kv_heads: int, special: dict[str, Any]
) -> None:
    both = Both(family, heads, kv_heads, special, torch.float32)
    differences = [both.step(both.enter(63, 0), both.enter(1, 1, 2))]
    differences += [both.step(), both.step()]  # row 0 outgrows its bucket of 64
    both.leave(1)
    differences += [both.step(), both.step(both.enter(5, 3))]
    differences += [both.step(*both.recompute()), both.step()]
    assert max(differences) < EXACT
    assert both.capture.captured == (2 if DEVICE.type == "cpu" else 0)  # three rows, filled up to four; two


def test_bfloat16_agrees_to_its_rounding() -> None:
    both = Both("qwen3", 4, 2, {}, torch.bfloat16)
    assert max(both.step(both.enter(20, 0), both.enter(3, 1)), both.step(), both.step()) < rounding(
        OPERATIONS, torch.bfloat16, size=1.0
    )


def test_weights_that_are_copied_into_the_model_are_seen() -> None:
    both = Both("qwen3", 2, 2, {}, torch.float32)
    both.step(both.enter(9, 0))
    both.step()
    chance = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for ours, theirs in zip(both.bucketed.model.parameters(), both.tabled.model.parameters(), strict=True):
            theirs.copy_(ours.copy_(torch.randn(ours.shape, generator=chance) * 0.2))
    assert max(both.step(*both.recompute()), both.step()) < EXACT


def test_logits_stay_what_they_were_when_the_next_step_is_replayed() -> None:
    both = Both("qwen3", 2, 1, {}, torch.float32)
    both.step(both.enter(4, 0))
    newest, lengths = np.array([3]), np.array([5])
    _, first = both.tabled.forward(newest, lengths, [])
    kept = first.clone()
    both.tabled.forward(newest + 1, lengths + 1, [])
    assert torch.equal(first, kept)
