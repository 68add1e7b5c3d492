"""What the compiled loops of a decode step promise beyond their numbers.

- Capped scores are right to rounding, small ones too, whatever the cap.
- The process that compiled them computes the bits of those that read them from the disk: the two may be
  engines of the same run.
"""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from stretto_kernels import compiled
from stretto_kernels.decode_attention import ragged_attention
from stretto_kernels.rule import Rule
from tests.tolerances import assert_close, near

_SHOWN_BITS = """
import hashlib, os
import numpy as np, torch
from stretto_kernels.rule import Rule
from stretto_kernels.decode_attention import ragged_attention
from stretto_kernels.draw import draw
from stretto_kernels.fused import gate, norm, norm_of_sum, rotate

def show():
    torch.manual_seed(1)
    query, keys, values = (torch.randn(shape) for shape in ((99, 2, 16), (99, 1, 128, 16), (99, 1, 128, 16)))
    for rule in (Rule(), Rule(window=7), Rule(softcap=3.0)):
        seen = ragged_attention(query, keys, values, np.arange(3, 102), rule)
        print(hashlib.sha256(seen.numpy().tobytes()).hexdigest(), flush=True)
    rows, weight = keys[:, 0], torch.rand(16)
    fused = (norm(rows, weight, 1e-6), *norm_of_sum(rows, rows, weight, 1e-6), gate(rows, rows))
    fused += (rotate(rows[:1, :, None], weight, 1e-6, rows[:1], rows[:1]),)
    drawn = draw(rows.flatten(0, 1), np.zeros(99 * 128, np.bool_), np.linspace(0, 0.99, 99 * 128))
    together = b"".join(part.numpy().tobytes() for part in fused) + b"".join(part.tobytes() for part in drawn)
    print(hashlib.sha256(together).hexdigest(), flush=True)

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
def test_the_process_that_compiled_computes_the_same_bits_as_those_that_read_from_the_disk(tmp_path: Path) -> None:
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", _SHOWN_BITS], env=environment, check=True, capture_output=True, text=True
    )
    *by_the_compiler, written = (lines := done.stdout.split())[:5]
    *by_the_reader, afterwards = lines[5:]
    assert int(written) > 0
    assert by_the_reader == by_the_compiler
    assert len(set(by_the_compiler)) == 4
    assert afterwards == written  # the second read what the first had written
