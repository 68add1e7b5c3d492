"""Promise: in each form, the reward of a completion is the number that the model itself gives prompt and completion,
when a real server of vLLM serves it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

from stretto.model.hf.build import build_policy
from stretto_verify.models import RewardModel, RewardModelConfig
from tests.real_engines.scoring import TOLERANCE
from tests.real_engines.serving import MODEL, Installed, RealServer

CHAT = "{% for m in messages %}{{ m.content }}={% endfor %}"
PROMPT, COMPLETIONS = "1+2=", ("3", "4", "12345")


@pytest.fixture(scope="module")
def graded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with one class, over the tokenizer of the small policy."""
    folder = tmp_path_factory.mktemp("model") / "graded"
    build_policy(MODEL, folder, seed=5)
    config = AutoConfig.from_pretrained(folder, num_labels=1)
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(5)
        AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = CHAT
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def address(installed: Installed, graded: Path) -> Iterator[str]:
    if installed.kind != "vllm":
        pytest.skip("the forms are those of vLLM")
    server = RealServer(installed, graded, arguments=["--runner", "pooling", "--stream-interval", "1"])
    try:
        server.until_up()
        yield f"http://{server.address}/v1"
    finally:
        server.close()


def number_of(graded: Path, text: str) -> float:
    """The sigmoid of the class, which is what vLLM serves unless it is told otherwise."""
    model: Any = AutoModelForSequenceClassification.from_pretrained(graded, dtype=torch.float32).eval()
    ids = AutoTokenizer.from_pretrained(graded)(text, return_tensors="pt", add_special_tokens=False).input_ids
    with torch.no_grad():
        return float(model(ids).logits[0, 0].sigmoid())


@pytest.mark.parametrize(
    ("form", "chat"), [("classify", False), ("classify", True), ("pooling", False), ("pooling", True), ("score", False)]
)
def test_the_reward_is_the_models_own_number(
    address: str, graded: Path, form: Literal["classify", "pooling", "score"], chat: bool
) -> None:
    asked = RewardModel(RewardModelConfig(address=address, model=str(graded), form=form, chat=chat))
    for completion in COMPLETIONS:
        text = f"{PROMPT}={completion}=" if chat else f"{PROMPT}{completion}"
        assert abs(asked(PROMPT, completion, "") - number_of(graded, text)) < TOLERANCE
