"""Promises of reading cached keys and values on a GPU (in Triton's interpreter where there is none):

- each row of each bucket gets what dense reading gives, to rounding, for all lengths, chunks, groups, windows, caps;
- what lies behind a row's end has no effect, nor do empty chunks;
- what is written to a row is found where the row keeps it, in its layer, and nowhere else;
- the kernels compile for an H100 without one, and read 16 bytes at once.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from stretto.model.decode.steps import Dense, attention_window
from stretto_kernels.gpu.attention import read_rows, reads_ragged, write_rows
from stretto_kernels.gpu.tables import Chunks, cut, slots_of
from stretto_kernels.rule import Rule
from tests.tolerances import FEW, assert_close

pytest.importorskip("triton")

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
LAYERS, LAYER = 2, 1
TYPES = [torch.float32, torch.float16, torch.bfloat16]
SCORES = 10.0  # products of normal numbers and their means are no larger


def caches(
    chance: torch.Generator, buckets: list[list[int]], kv_heads: int, width: int, kind: torch.dtype
) -> list[Tensor]:
    """A cache [2, Z, S, K, L, D] for each bucket of rows with these lengths, with slots and tokens to spare."""
    shapes = [(2, LAYERS, len(ends) + 1, kv_heads, max(ends) + 3, width) for ends in buckets]
    return [torch.randn(shape, generator=chance).to(DEVICE, kind) for shape in shapes]


def table(held: list[Tensor], buckets: list[list[int]]) -> Tensor:
    slots = [slots_of(cache[0, LAYER], cache[1, LAYER], len(ends)) for cache, ends in zip(held, buckets, strict=True)]
    return torch.from_numpy(np.concatenate(slots)).to(DEVICE)


def read(query: Tensor, held: list[Tensor], buckets: list[list[int]], chunks: Chunks, rule: Rule) -> Tensor:
    items, bounds = (torch.from_numpy(x).to(DEVICE) for x in (chunks.items, chunks.bounds))
    return read_rows(query, table(held, buckets), items, bounds, rule, held[0].shape[3])


def chunks_of(buckets: list[list[int]], rule: Rule, spare: int, grain: int) -> Chunks:
    ends = np.array([end for bucket in buckets for end in bucket])
    firsts = np.zeros_like(ends) if rule.window is None else np.maximum(ends - rule.window, 0)
    return cut(firsts, ends, len(ends) + spare, grain)


def dense(query: Tensor, held: list[Tensor], buckets: list[list[int]], rule: Rule) -> Tensor:
    """In float32, bucket by bucket."""
    parts, first = [], 0
    for cache, ends in zip(held, buckets, strict=True):
        newest = np.array(ends) - 1
        looking = Dense(
            {rule.window: attention_window(newest, torch.from_numpy(newest).to(DEVICE), rule.window, torch.float32)}
        )
        asked = query[first : first + len(ends)].float()
        parts.append(looking.attend(asked, cache[0, LAYER].float(), cache[1, LAYER].float(), rule))
        first += len(ends)
    return torch.cat(parts)


@settings(max_examples=6)
@given(
    seed=st.integers(0, 1000),
    buckets=st.lists(st.lists(st.integers(1, 70), min_size=1, max_size=2), min_size=1, max_size=2),
    heads=st.sampled_from([(1, 1), (2, 2), (4, 2), (6, 1)]),
    width=st.sampled_from([8, 16, 24, 64]),
    rule=st.builds(
        Rule,
        scaling=st.sampled_from([None, 0.07]),
        window=st.sampled_from([None, 1, 3, 17]),
        softcap=st.sampled_from([None, 0.5, 30.0, 200.0]),
    ),
    kind=st.sampled_from(TYPES),
    spare=st.sampled_from([1, 3, 9]),
    grain=st.sampled_from([1, 8, 64]),
)
def test_rows_take_what_dense_reading_takes(
    seed: int,
    buckets: list[list[int]],
    heads: tuple[int, int],
    width: int,
    rule: Rule,
    kind: torch.dtype,
    spare: int,
    grain: int,
) -> None:
    chance = torch.Generator().manual_seed(seed)
    held = caches(chance, buckets, heads[1], width, kind)
    query = torch.randn(sum(map(len, buckets)), heads[0], width, generator=chance).to(DEVICE, kind)
    taken = read(query, held, buckets, chunks_of(buckets, rule, spare, grain), rule)
    assert taken.dtype == kind
    expected = dense(query, held, buckets, rule)
    size = SCORES if kind is torch.float32 else None  # of halves the weights and the result are rounded, not the scores
    assert_close(taken.float(), expected, width + 70 if size else FEW, dtype=kind, size=size)


def test_a_query_may_lie_head_by_head_in_memory() -> None:
    chance, buckets = torch.Generator().manual_seed(1), [[5, 9], [20]]
    held = caches(chance, buckets, 2, 16, torch.float32)
    query = torch.randn(4, 3, 16, generator=chance).to(DEVICE).transpose(0, 1)
    taken = read(query, held, buckets, chunks_of(buckets, Rule(), 2, 8), Rule())
    assert_close(taken, dense(query, held, buckets, Rule()), 16 + 20, size=SCORES)


def test_what_lies_outside_a_row_has_no_effect() -> None:
    chance, buckets, rule = torch.Generator().manual_seed(2), [[10, 25]], Rule(window=8)
    held = caches(chance, buckets, 2, 16, torch.float32)
    query = torch.randn(2, 4, 16, generator=chance).to(DEVICE)
    chunks = chunks_of(buckets, rule, 3, 4)
    before = read(query, held, buckets, chunks, rule)
    for row, end in enumerate(buckets[0]):
        held[0][:, :, row, :, end:], held[0][:, :, row, :, : end - 8] = torch.nan, torch.nan
    held[0][:, 1 - LAYER], held[0][:, :, 2] = torch.nan, torch.nan
    assert torch.equal(read(query, held, buckets, chunks, rule), before)


def test_scores_far_apart_do_not_overflow() -> None:
    cache = torch.zeros(2, LAYERS, 1, 1, 3, 8, device=DEVICE)
    cache[0, LAYER, 0, 0, :, 0] = torch.tensor([-4e4, 4e4, 0.0])
    cache[1, LAYER, 0, 0, :, 0] = torch.tensor([1.0, 2.0, 3.0])
    query = torch.eye(8, device=DEVICE)[:1, None]
    for grain in (1, 64):
        rule = Rule(scaling=1.0)
        assert read(query, [cache], [[3]], chunks_of([[3]], rule, 3, grain), rule)[0, 0, 0] == 2.0


def test_tokens_are_written_to_their_place_in_their_layer_and_nowhere_else() -> None:
    held = [torch.zeros(2, LAYERS, 2, 3, 6, 8, device=DEVICE), torch.zeros(2, LAYERS, 3, 3, 9, 8, device=DEVICE)]
    new = torch.randn(2, 4, 3, 8, device=DEVICE)
    writes = np.array([[3, 0, 5], [1, 1, 0], [1, 2, 8], [0, 2, 7]])  # rows 0 and 1 on the first bucket, 2 on the second
    where = torch.from_numpy(writes).to(DEVICE)
    write_rows(new[0], new[1], table(held, [[6, 1], [9]]), where)
    for kind in range(2):
        expected = [torch.zeros_like(cache[kind]) for cache in held]
        expected[0][LAYER, 0, :, 5], expected[0][LAYER, 1, :, 0] = new[kind, 3], new[kind, 1]
        expected[1][LAYER, 0, :, 8], expected[1][LAYER, 0, :, 7] = new[kind, 1], new[kind, 0]
        assert all(torch.equal(cache[kind], one) for cache, one in zip(held, expected, strict=True))


def test_only_a_gpu_reads_so() -> None:
    assert not reads_ragged(torch.device("cpu"), torch.bfloat16, 128)
    assert reads_ragged(torch.device("cuda"), torch.bfloat16, 128) == torch.cuda.is_available()
    assert not reads_ragged(torch.device("cuda"), torch.float64, 128)
    assert not reads_ragged(torch.device("cuda"), torch.bfloat16, 20)  # rows that do not begin at multiples of 16 bytes


@pytest.mark.long
def test_the_kernels_compile_for_an_h100_and_move_16_bytes_at_once(tmp_path: Path) -> None:
    # In a process of its own: the interpreter has put itself in the place of the language in this one.
    words = [sys.executable, "-m", "tests.model.compiling", "bf16,0.0,128", "fp16,30.0,96"]
    surroundings = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(words, capture_output=True, text=True, check=False, env=surroundings)
    assert done.returncode == 0, done.stderr
    for kernels in json.loads(done.stdout):
        copies = re.findall(r"cp\.async\.\w+\.shared\.global \[[^]]*\], \[[^]]*\], (\w+)", kernels["read"])
        assert set(copies) == {"0x10"}
        assert "mma.sync" in kernels["read"]
        assert set(re.findall(r"st\.global\.([\w.]+)", kernels["write"])) == {"v4.b32"}
        assert kernels["combine"]
        assert kernels["find"]
        assert kernels["cut"]
        assert kernels["rotate"]
        assert kernels["enter"]
        for name in ("tops", "reach", "gather", "sums", "norm", "gate"):
            assert "v4.b32" in re.findall(r"ld\.global\.(v4\.b32)", kernels[name]), f"{name}: 16 bytes at once"
