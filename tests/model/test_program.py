"""Promises of a trace as a program, one call of a compiled loop for a step:

- it computes what the module computes, in steps with and without contexts, for every family whose calls it knows, also
  where some products are by other kernels, and rounds as the fused calls do;
- rows of several buckets, more tokens than go through the loop at once, positions beyond all before, and weights that
  change are followed, and the logits of a step are not those of the next;
- a trace with another call is no program.
"""

import os
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.fx import GraphModule
from transformers import PreTrainedModel

from stretto.model.decode.policy import Context, DecodePolicy
from stretto.model.kernels import use_onednn
from stretto_kernels.compiled import AVAILABLE
from stretto_kernels.steps import trace as tracing
from stretto_kernels.steps.matmul import Chooser, KernelChoice, Name, Shape
from stretto_kernels.steps.trace import Forward, trace
from tests.model.choosing import always
from tests.model.families import VOCABULARY, Family
from tests.model.test_trace import OPERATIONS, QWEN, both, model, two_steps
from tests.tolerances import assert_close

pytestmark = pytest.mark.skipif(not AVAILABLE, reason="numba is not installed")

FAMILIES: list[Family] = [
    ("qwen3", 2, 2, {}),
    ("qwen3", 4, 1, {"tie_word_embeddings": True}),
    ("qwen2", 4, 2, {}),
    ("llama", 2, 1, {}),
    ("mistral", 4, 2, {"sliding_window": 11}),
]


def is_program(forward: Forward) -> bool:
    return isinstance(forward, partial) and not isinstance(getattr(forward.func, "__self__", None), GraphModule)


def in_panels(family: Family, dtype: torch.dtype = torch.float32, chooser: Chooser | None = None) -> PreTrainedModel:
    made: PreTrainedModel = torch.nn.Module.to(model(family), dtype)
    use_onednn(made, chooser=chooser or always("panels"))
    return made


def far_apart(policy: DecodePolicy) -> torch.Tensor:
    """Logits of 130 rows with contexts of 1 to 200 tokens, and of their next tokens."""
    chance = np.random.default_rng(1)
    prompts = [chance.integers(0, VOCABULARY, (2 + 199 * row // 129,)) for row in range(130)]
    newest, lengths = np.array([prompt[-1] for prompt in prompts]), np.array([len(prompt) for prompt in prompts])
    order, entered = policy.forward(newest, lengths, [Context(p[:-1], (row,)) for row, p in enumerate(prompts)])
    order_2, followed = policy.forward(chance.integers(0, VOCABULARY, (130,)), lengths + 1, [])
    return torch.cat([entered[np.argsort(order)], followed[np.argsort(order_2)]])


@pytest.mark.parametrize("family", FAMILIES, ids=str)
def test_a_program_computes_what_the_module_computes(family: Family) -> None:
    program, module = both(in_panels(family))
    assert is_program(program.forward_of_model)
    assert_close(two_steps(program), two_steps(module), OPERATIONS)


def test_rows_of_every_length_are_computed_as_by_the_module() -> None:
    program, module = both(in_panels(QWEN))
    assert_close(far_apart(program), far_apart(module), OPERATIONS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_program_rounds_as_the_fused_calls_do(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = in_panels(QWEN, dtype)
    program = DecodePolicy(policy)
    monkeypatch.setattr(tracing, "program", lambda *_: None)
    calls = DecodePolicy(policy)
    assert is_program(program.forward_of_model)
    assert not is_program(calls.forward_of_model)
    # The same loops; the compiler may add up in another order where a loop stands in another one.
    assert_close(two_steps(program), two_steps(calls), OPERATIONS if dtype is torch.float32 else 1, dtype=dtype)


@pytest.mark.parametrize("others", ["linear", "columns", "packed"])
def test_products_by_other_kernels_stand_between(others: Name) -> None:
    def half_of_them(shapes: Sequence[Shape], dtype: Any, kernels: Sequence[Name]) -> dict[Shape, KernelChoice]:
        return {
            shape: KernelChoice("panels" if at % 2 else others if others in kernels else "linear")
            for at, shape in enumerate(shapes)
        }

    program, module = both(in_panels(("qwen2", 4, 2, {}), chooser=half_of_them))
    assert is_program(program.forward_of_model)
    assert_close(two_steps(program), two_steps(module), OPERATIONS)


def test_weights_that_change_are_seen_and_earlier_logits_stay() -> None:
    program, module = both(in_panels(QWEN))
    before = two_steps(program)
    kept = before.clone()
    program.clear()
    with torch.no_grad():
        for parameter in program.model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.2)
    after = two_steps(program)
    assert_close(after, two_steps(module), OPERATIONS)
    assert torch.equal(before, kept)
    assert not torch.allclose(after, before, atol=0.1)


def test_memory_of_a_long_step_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stretto_kernels.steps.program._KEPT_BYTES", 1 << 14)
    program, module = both(in_panels(QWEN))
    held = vars(program.forward_of_model.func.__self__)  # type: ignore[attr-defined]
    short, long = (np.arange(tokens) % VOCABULARY for tokens in (5, 200))
    for text in (short, long, long, short):
        assert_close(program.forward_of_texts([text]), module.forward_of_texts([text]), OPERATIONS)
        assert (held["_memory"].nbytes > 0) == (text is short)


def test_a_step_after_one_that_ran_out_of_memory_for_angles_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    name, heads, kv_heads, _ = QWEN
    program, module = both(in_panels((name, heads, kv_heads, {"max_position_embeddings": 1024})))
    text = np.arange(600) % VOCABULARY

    def fail(**_: Any) -> None:
        raise MemoryError

    with monkeypatch.context() as patched:
        patched.setattr(program.forward_of_model.func.__self__, "_angles", fail)  # type: ignore[attr-defined]
        with pytest.raises(MemoryError):
            program.forward_of_texts([text])
    program.clear()
    assert_close(program.forward_of_texts([text]), module.forward_of_texts([text]), OPERATIONS)


def test_angles_of_weights_are_not_kept() -> None:
    policy = in_panels(QWEN)
    embedding: Any = policy.model.rotary_emb
    frequencies = embedding.inv_freq
    del embedding.inv_freq
    embedding.inv_freq = torch.nn.Parameter(frequencies)
    traced, module = both(policy)
    two_steps(traced)
    traced.clear()
    with torch.no_grad():
        embedding.inv_freq *= 3
    assert_close(two_steps(traced), two_steps(module), OPERATIONS)


def test_a_trace_with_a_computed_weight_or_one_column_by_column_stays() -> None:
    computed, turned = in_panels(QWEN), in_panels(QWEN)
    head: Any = computed.lm_head
    factor = torch.nn.Parameter(torch.ones(()))
    head.forward = lambda x: torch.nn.functional.linear(x, head.weight * factor)
    words = turned.get_parameter("model.embed_tokens.weight")
    words.data = words.data.t().contiguous().t()
    for policy in (computed, turned):
        traced, module = both(policy)
        assert not is_program(traced.forward_of_model)
        assert_close(two_steps(traced), two_steps(module), OPERATIONS)


def test_a_row_has_the_same_logits_whatever_enters_beside_it() -> None:
    """To the last bit: one loop computes the rows of all steps."""
    program, _ = both(in_panels(QWEN))
    prompt = np.arange(20) % VOCABULARY
    newest, lengths = np.full(2, prompt[-1]), np.full(2, 20)
    program.forward(newest, lengths, [Context(prompt[:-1], (0,))])
    _, alone = program.forward(newest, lengths, [])
    order, together = program.forward(newest, lengths, [Context(prompt[:-1], (1,))])
    assert torch.equal(together[order.tolist().index(0)], alone[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_token_outside_the_vocabulary_has_no_logits(dtype: torch.dtype) -> None:
    program = DecodePolicy(in_panels(QWEN, dtype))
    for odd in (-1, VOCABULARY):
        order, logits = program.forward(np.array([3, odd]), np.ones(2, np.int64), [Context(np.array([], int), (0, 1))])
        assert logits[np.argsort(order)].isfinite().all(-1).tolist() == [True, False]
        program.clear()


@pytest.mark.parametrize("family", [("gemma2", 4, 2, {}), ("gemma3_text", 4, 1, {"query_pre_attn_scalar": 8})], ids=str)
def test_a_trace_with_another_call_is_no_program(family: Family) -> None:
    assert not is_program(trace(in_panels(family)))
    assert not is_program(trace(model(QWEN)))  # no product is in panels


def test_a_loop_is_compiled_anew_when_a_function_that_it_inlines_has_changed(tmp_path: Path) -> None:
    inner, outer = tmp_path / "inner.py", tmp_path / "outer.py"
    outer.write_text(
        "from inner import times\nfrom stretto_kernels.compiled import compiled\n"
        "@compiled\ndef loop(x): return times(x)\n"
        "print(loop(7), sum(loop.stats.cache_hits.values()))\n"
    )

    def told(factor: int) -> str:
        inner.write_text(f"from stretto_kernels.compiled import inlined\n@inlined\ndef times(x): return x * {factor}\n")
        environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path / "cache")}
        return subprocess.run(
            [sys.executable, outer], env=environment, check=True, capture_output=True, text=True, timeout=100
        ).stdout

    assert told(2) == "14 0\n"
    assert told(10) == "70 0\n", "numba itself would load the loop that multiplies by 2"


def test_a_loop_is_compiled_anew_if_a_process_ended_while_it_saved_the_loop(tmp_path: Path) -> None:
    program = tmp_path / "program.py"

    def write(factor: int) -> None:
        program.write_text(
            "import os, sys\nfrom numba.core.caching import IndexDataCacheFile as Files\n"
            "from stretto_kernels.compiled import compiled\n"
            "left, write = [None] * int(sys.argv[1]), Files._open_for_write\n"
            "Files._open_for_write = lambda *to: write(*to) if left and not left.pop() else os._exit(0)\n"
            f"@compiled\ndef loop(x): return x * {factor}\n"
            "print(loop(7))\n"
        )

    def told(writes: int) -> str:
        environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path / "cache")}
        call = [sys.executable, str(program), str(writes)]
        return subprocess.run(call, env=environment, check=True, capture_output=True, text=True, timeout=100).stdout

    write(2)
    assert told(writes=2) == "14\n"
    write(10)
    assert told(writes=1) == ""
    assert told(writes=2) == "70\n", "numba itself would load the file of x * 2"
    assert len(list(tmp_path.rglob("*.nbc"))) == 1, "the file of earlier code is removed"
