"""Promise: engine and trainer evaluate the same distribution, by the record that the recipe's `[sampling]` becomes."""

from pathlib import Path

import numpy as np
import pytest
import torch

from stretto.core.records import GenerateRequest
from stretto.engine.config import EngineConfig
from stretto.engine.native.engine import NativeEngine
from stretto.launch.recipe.sections import SamplingConfig
from stretto.model.hf.build import build_policy
from stretto.model.hf.folder import load_policy
from stretto.model.packed.attention import PACKED_ATTENTION
from stretto.model.packed.logprobs import pack_tokens
from stretto.trainer.config import OptimizerConfig
from stretto.trainer.optimizer import Learner
from tests.tiny_policy import TINY
from tests.tolerances import EXACT


@pytest.mark.parametrize(
    "section",
    [
        {"temperature": 0.7, "top_p": 0.9},
        {"temperature": 0.7, "top_p": 0.9, "stop": ("12", "=")},
        {"top_k": 4},
        {"temperature": 1.4, "top_k": 9, "top_p": 0.8, "min_p": 0.1},
        {},
    ],
)
def test_the_trainers_logprobs_are_those_that_the_engine_logged(section: dict[str, object], tmp_path: Path) -> None:
    folder = tmp_path / "policy"
    build_policy(TINY, folder, seed=5)
    sampling = SamplingConfig.model_validate({"max_tokens": 48, **section}).record((1,))
    engine = NativeEngine.load(folder, EngineConfig(slots=64))
    prompts = np.random.default_rng(1).integers(2, 22, (8, 9))
    for name, prompt in enumerate(prompts.tolist()):
        seeds = tuple(range(8 * name, 8 * name + 8))
        engine.add(GenerateRequest(id=str(name), prompt_token_ids=tuple(prompt), seeds=seeds, sampling=sampling))
    ended = []
    while not engine.idle:
        ended += engine.step()
    sequences = [[*prompts[int(completion.request)].tolist(), *completion.token_ids] for completion in ended]
    packed = pack_tokens(sequences, [range(9, len(sequence)) for sequence in sequences])
    learner = Learner(load_policy(folder, attention=PACKED_ATTENTION), OptimizerConfig(), sampling)
    with torch.no_grad():
        ours = learner.logprobs(packed).logprobs.numpy()
    theirs = np.concatenate([completion.behavior_logprobs for completion in ended])
    assert len(theirs) > 200
    assert np.abs(ours - theirs).max() < EXACT
