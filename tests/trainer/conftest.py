from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from stretto.model.hf.layers import saved_buffers
from tests.model.families import EXPERTS, SLIDING, config
from tests.tiny_policy import sized
from tests.trainer.several_ranks import run_program
from tests.trainer.two_machines import Site, two_machines
from tests.trainer.unloaded import FIRST


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="package")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with two_machines(tmp_path_factory.mktemp("here"), tmp_path_factory.mktemp("there")) as made:
        yield made


FAMILIES: dict[str, dict[str, Any]] = {
    FIRST: {},
    "qwen2": {},
    "gemma3_text": {"sliding_window": 7, "layer_types": SLIDING, "query_pre_attn_scalar": 8},
    "qwen3_moe": EXPERTS,
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "minimax_m2": {"num_local_experts": 4, "num_experts_per_tok": 2},  # a saved buffer balances its experts
}
_LARGE = sized(4096, width=640, inner=1920, layers=8, heads=(10, 10), head=64, max_position_embeddings=64)


@pytest.fixture(scope="package")
def rank_runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What every rank of every training saw, and the models of the families."""
    folder = tmp_path_factory.mktemp("ranks")
    for number, (family, special) in enumerate(FAMILIES.items()):
        torch.manual_seed(number)
        model = AutoModelForCausalLM.from_config(config(family, 4, 2, special))
        for _, buffer in saved_buffers(model):
            torch.nn.init.normal_(buffer)
        model.save_pretrained(folder / "models" / family)
    large = Qwen3Config(**_LARGE, tie_word_embeddings=False)
    AutoModelForCausalLM.from_config(large, dtype=torch.bfloat16).save_pretrained(folder / "models" / "large")
    run_program("tests.trainer.rank_runs", folder)
    return folder
