"""Promises: the longest row is one that an engine serves, and one token more is refused, unless the context ends there;
what is known of it from a folder is what the loaded engine says.
"""

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stretto.core.errors import RefusedRequest
from stretto.core.records import GenerateRequest, Sampling
from stretto.engine.config import EngineConfig
from stretto.engine.native.engine import NativeEngine
from stretto.engine.native.scheduler import Scheduler, longest_row, longest_row_of
from stretto.model.decode.length_buckets import CacheLayout
from stretto.model.hf.folder import inspect_model_folder


def layout(context: int) -> CacheLayout:
    return CacheLayout(2, 1, 16, context, torch.float16, torch.device("cpu"))


def served(scheduler: Scheduler, tokens: int) -> bool:
    sampling = Sampling(max_tokens=tokens - 1)
    try:
        scheduler.add(GenerateRequest(id=f"{tokens}", prompt_token_ids=(1,), seeds=(1,), sampling=sampling))
    except RefusedRequest:
        return False
    return True


@given(context=st.integers(2, 5000), cache=st.integers(0, 6000), spare=st.integers(0, 127))
def test_the_longest_row_is_the_longest_that_is_served(context: int, cache: int, spare: int) -> None:
    shape = layout(context)
    longest = longest_row(shape, cache * shape.bytes_per_token + spare)
    scheduler = Scheduler(4, cache, shape.slot)
    assert 0 <= longest <= context
    assert longest == 0 or served(scheduler, longest)
    assert longest == context or not served(scheduler, longest + 1)


def test_rows_by_hand() -> None:
    of_tokens = [(0, 0), (63, 0), (64, 64), (127, 64), (128, 128), (699, 512), (999, 512), (1000, 1000), (5000, 1000)]
    shape = layout(1000)
    assert [longest_row(shape, held * shape.bytes_per_token) for held, _ in of_tokens] == [row for _, row in of_tokens]
    assert longest_row(layout(40), 40 * shape.bytes_per_token) == 40


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("gib", [1e-5, 2e-5, 1.0])
def test_a_folder_tells_what_its_engine_will_say(folder: Path, dtype: str, gib: float) -> None:
    config = EngineConfig.model_validate({"slots": 2, "dtype": dtype, "cache_gib": gib})
    told = longest_row_of(inspect_model_folder(folder), config)
    assert told == NativeEngine.load(folder, config).longest_row
    assert told in (0, 64, 128, 192)
