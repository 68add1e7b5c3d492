"""What the compiled attention of a decode step promises beyond its numbers, which `test_cached.py` holds.

- Capped scores are right to rounding, small ones too, whatever the cap.
- The process that compiled it computes what those compute that read it from the disk, to the last bit: the two may be
  engines of the same run.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from stretto.model.attention_support import Rule
from stretto.model.kernels import compiled
from stretto.model.kernels.decode_attention import ragged_attention
from tests.tolerances import assert_close, near

_SHOWN_BITS = """
import hashlib, os
import numpy as np, torch
from stretto.model.attention_support import Rule
from stretto.model.kernels.decode_attention import ragged_attention

def show():
    torch.manual_seed(1)
    query, keys, values = (torch.randn(shape) for shape in ((99, 2, 16), (99, 1, 128, 16), (99, 1, 128, 16)))
    for rule in (Rule(), Rule(window=7), Rule(softcap=3.0)):
        seen = ragged_attention(query, keys, values, np.arange(3, 102), rule)
        print(hashlib.sha256(seen.numpy().tobytes()).hexdigest(), flush=True)

for process in ("compiles", "reads"):  # each after the other, of one that has imported what both need
    if (child := os.fork()) == 0:
        show()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    written = [name for _, _, names in os.walk(os.environ["NUMBA_CACHE_DIR"]) for name in names if name.endswith("nbc")]
    print(len(written), flush=True)
"""


@pytest.mark.skipif(not compiled.AVAILABLE, reason="numba is not installed")
@pytest.mark.parametrize("cap", [0.5, 30.0, 50.0, 200.0])
def test_a_capped_score_is_its_hyperbolic_tangent(cap: float) -> None:
    """Beside float64. With one number to a query and a key, and the values 1 and 0, what is taken is the logistic of
    the difference of two capped scores, here of a score and 0."""
    scores = torch.cat([torch.logspace(-4, 0, 60), torch.linspace(1, 400, 40)])
    capped = cap * (scores.double() / cap).tanh()
    for score, expected in zip(scores.tolist(), capped.tolist(), strict=True):
        assert cap * float(compiled.tanh(np.float32(score / cap))) == near(expected)
        assert cap * float(compiled.tanh(np.float32(-score / cap))) == near(-expected)
    query, keys = scores[:, None, None], torch.tensor([1.0, 0.0]).expand(100, 1, 2)[..., None].contiguous()
    taken = ragged_attention(query, keys, keys, np.full(100, 2), Rule(scaling=1.0, softcap=cap))[:, 0, 0]
    assert_close(taken.double(), capped.sigmoid())


@pytest.mark.skipif(not compiled.AVAILABLE, reason="numba is not installed")
@pytest.mark.long  # `make test-numerics` runs it too
def test_whoever_compiled_it_computes_the_same_bits_as_those_who_read_it_from_the_disk(tmp_path: Path) -> None:
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", _SHOWN_BITS], env=environment, check=True, capture_output=True, text=True
    )
    *by_the_compiler, compiled, a, b, c, afterwards = done.stdout.split()
    assert int(compiled) > 0
    assert [a, b, c] == by_the_compiler
    assert len(set(by_the_compiler)) == 3
    assert afterwards == compiled  # the second read what the first had written
