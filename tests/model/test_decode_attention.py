"""What the compiled attention of a decode step promises beyond its numbers, which `test_cached.py` holds.

- The process that compiled it computes what those compute that read it from the disk, to the last bit: the two may be
  engines of the same run.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from stretto.model.kernels import decode_attention as ragged

_SHOWN_BITS = """
import hashlib
import numpy as np, torch
from stretto.model.packed.attention import Rule
from stretto.model.kernels.decode_attention import ragged_attention

torch.manual_seed(1)
query, keys, values = (torch.randn(shape) for shape in ((99, 2, 16), (99, 1, 128, 16), (99, 1, 128, 16)))
for rule in (Rule(), Rule(window=7), Rule(softcap=3.0)):
    seen = ragged_attention(query, keys, values, np.arange(3, 102), rule)
    print(hashlib.sha256(seen.numpy().tobytes()).hexdigest())
"""


@pytest.mark.skipif(not ragged.AVAILABLE, reason="numba is not installed")
def test_whoever_compiled_it_computes_the_same_bits_as_those_who_read_it_from_the_disk(tmp_path: Path) -> None:
    def shown() -> str:
        environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
        command = [sys.executable, "-c", _SHOWN_BITS]
        return subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout

    by_the_compiler = shown()
    assert list(tmp_path.rglob("*.nbc"))
    assert shown() == by_the_compiler
    assert len(set(by_the_compiler.split())) == 3
