"""The promise of memory: with a vocabulary of 150,000, forward and backward, no more than one chunk of logits is alive,
with and without the entropy.

Measured by the kernel, in a process of its own: its resident memory, and the peak of it.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.long  # a model with a vocabulary of 150,000

ROOT = Path(__file__).parents[2]
VOCABULARY, TOKENS, WIDTH = 150_000, 160, 8
ROW = VOCABULARY * 4  # bytes of a token's logits
PROGRAM = """
import json, sys
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM
from benchmarks.memory import forget_peak, peak_bytes, resident_bytes
from stretto.core.records import Sampling
from stretto.model.packed.logprobs import pack_tokens, token_logprobs
from stretto.model.packed.attention import PACKED_ATTENTION

torch.set_num_threads(1)
vocabulary, tokens, width = map(int, sys.argv[1:])
config = Qwen3Config(vocab_size=vocabulary, hidden_size=width, num_hidden_layers=1, num_attention_heads=1,
                     num_key_value_heads=1, head_dim=8, intermediate_size=8)
model = Qwen3ForCausalLM._from_config(config, attn_implementation=PACKED_ATTENTION)

def learn(length, rows, entropy):
    packed = pack_tokens([[1] * (length + 1)])
    found = token_logprobs(model, packed, Sampling(max_tokens=1), entropy=entropy, chunk_logits=rows * vocabulary)
    (found.logprobs.sum() + (found.entropy.sum() if entropy else 0)).backward()

learn(2, 1, True)  # what is made once: code, gradients
for rows in (16, 64):
    for entropy in (False, True):
        before = resident_bytes()
        forget_peak()
        learn(tokens, rows, entropy)
        print(json.dumps([rows, entropy, peak_bytes() - before]))
"""


@pytest.fixture(scope="module")
def peaks() -> dict[tuple[int, bool], int]:
    """Bytes above what was there before, by rows in a chunk and whether the entropy was wanted."""
    command = [sys.executable, "-c", PROGRAM, *map(str, (VOCABULARY, TOKENS, WIDTH))]
    # What is freed goes back to the kernel at once, so that the peak is of what is alive.
    surroundings = os.environ | {"GLIBC_TUNABLES": "glibc.malloc.mmap_threshold=262144"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True, env=surroundings)
    return {(rows, entropy): size for rows, entropy, size in map(json.loads, done.stdout.splitlines())}


@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("rows", [16, 64])
def test_one_chunk_and_no_second_one(peaks: dict[tuple[int, bool], int], rows: int, entropy: bool) -> None:
    beside = 4 * VOCABULARY * WIDTH * 4 + 3 * (1 << 22) + (8 << 20)  # the matrix's gradient, blocks, all else
    assert rows * ROW < peaks[rows, entropy] < rows * ROW + beside
    assert 64 * ROW + beside < TOKENS * ROW  # all logits at once would show


@pytest.mark.parametrize("entropy", [False, True])
def test_a_larger_chunk_costs_what_it_is_larger_by(peaks: dict[tuple[int, bool], int], entropy: bool) -> None:
    assert peaks[64, entropy] - peaks[16, entropy] == pytest.approx(48 * ROW, rel=0.25)
