"""Tiny policies with distributions that are neither flat nor a single point."""

from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, PreTrainedModel

from stretto.engine.native.engine import NativeEngine
from stretto.model.hf.build import build_policy
from tests.engine.answering import engine_of
from tests.engine.byte_policy import NAME, build_byte_policy
from tests.tiny_policy import TINY


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen3 policy with 22 tokens (0 padding, 1 end) and a context of 192."""
    path = tmp_path_factory.mktemp("engine") / "policy"
    build_policy(TINY, path, seed=1)
    return path


@pytest.fixture(scope="session")
def engine(folder: Path) -> NativeEngine:
    """Eight slots, idle and with the first weights, before a test and after it."""
    return engine_of(folder)


@pytest.fixture(scope="session")
def plain(folder: Path) -> PreTrainedModel:
    """The same policy as transformers loads it by itself."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    return model


@pytest.fixture(scope="session")
def byte_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A policy that writes any bytes, with a chat template."""
    return build_byte_policy(tmp_path_factory.mktemp("openai") / NAME)


@pytest.fixture(scope="session")
def byte_engine(byte_folder: Path) -> NativeEngine:
    """Of that policy, idle and with the first weights, before a test and after it."""
    return engine_of(byte_folder)
