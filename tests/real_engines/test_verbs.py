"""`stretto.Engine` with vLLM and SGLang behind it: what is sampled scores again as it was sampled, by the engine and by
a trainer, under the weights of the folder and under those of an update."""

from pathlib import Path
from typing import Any

import pytest

import stretto
from stretto.model.hf.build import build_policy
from tests.real_engines.scoring import TOLERANCE
from tests.real_engines.serving import MODEL, Installed

PROMPT = (5, 12, 7, 9)


@pytest.mark.timeout(1_200)
def test_an_engine_of_another_make_samples_scores_and_takes_weights(installed: Installed, tmp_path: Path) -> None:
    build_policy(MODEL, tmp_path / "model", seed=1)
    trainer = stretto.Trainer(tmp_path / "model", learning_rate=1e-2)
    settings: dict[str, Any] = {
        "kind": installed.kind,
        "python": str(installed.python),
        "cache_gib": 0.25,
        "device": "cpu",
    }
    with stretto.Engine.load(tmp_path / "model", **settings, dtype="float32", deadlines={"start": 600.0}) as engine:
        for version in (0, 1):
            sampled = engine.sample(PROMPT, 2, seed=version, max_tokens=8, stop_token_ids=())
            data = [stretto.Datum.of(PROMPT, one.token_ids, logprobs=one.logprobs, advantages=1.0) for one in sampled]
            scored = trainer.forward(data).logprobs, engine.score([(*PROMPT, *one.token_ids) for one in sampled])
            for one, *again in zip(sampled, *scored, strict=True):
                assert set(one.versions) == {version}
                for logprobs in again:
                    assert one.logprobs == pytest.approx(logprobs[len(PROMPT) - 1 :], abs=TOLERANCE)
            trainer.forward_backward(data, "policy_gradient")
            assert trainer.optim_step().taken
            assert engine.update(trainer.weights()) == engine.version == version + 1
