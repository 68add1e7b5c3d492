"""The embedded engine computes tokens that it has sampled again, before it loads the next version.

- Honest tokens differ by rounding alone: in float32 and bfloat16, at any temperature, cut off by top-p or not, of rows
  of every length, interrupted ones among them.
- Log-probabilities that are told too low show by as much.
- Only tokens of the version in use are compared, not those before it; no completion is changed by it.
- Where updates keep the KV cache, only tokens are compared whose whole context the version in use has computed: an
  honest engine is within rounding there, and one that lies shows, before itself and before the trainer.
- Texts computed in one pass have the logits of each alone.
"""

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Literal

import numpy as np
import pytest
import torch

from stretto.core.canary import AGREEING
from stretto.core.records import (
    Batch,
    Completion,
    GenerateRequest,
    Group,
    Outcome,
    Prompt,
    Sampling,
    Segment,
    Trajectory,
    Verdict,
)
from stretto.engine.native import engine as engine_module
from stretto.engine.native.engine import NativeEngine
from stretto.model.decode.policy import DecodePolicy
from tests.canary.ground import Ground, ground
from tests.canary.test_native import Dtype

NAME = "engine-0"
PROMPTS = ((5, 6, 7), (8,), tuple(range(2, 12)))
BEGUN = {f"r{at}": prompt for at, prompt in enumerate(PROMPTS)} | {"n": (9, 8)}


def requested(engine: NativeEngine, sampling: Sampling) -> None:
    for number, prompt in enumerate(PROMPTS):
        engine.add(GenerateRequest(f"r{number}", prompt, (number, number + 10), sampling))


def begun(one: Ground, sampling: Sampling, steps: int) -> NativeEngine:
    """Of an engine with a version, some steps of some requests."""
    one.publish()
    one.load()
    requested(one.engine, sampling)
    for _ in range(steps):
        one.engine.step()
    return one.engine


def error(pairs: tuple[tuple[float, float], ...]) -> float:
    return fmean(abs(told - again) for told, again in pairs)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "sampling",
    [Sampling(max_tokens=40), Sampling(max_tokens=40, temperature=0.6), Sampling(max_tokens=40, top_p=0.8)],
    ids=["plain", "cold", "cut off"],
)
def test_honest_tokens_differ_by_rounding_alone(tmp_path: Path, dtype: Dtype, sampling: Sampling) -> None:
    with ground(tmp_path, dtype) as one:
        found = begun(one, sampling, 12).look_back(64).sampled
        assert 60 <= len(found) <= 72, "of all rows but one, 12 tokens each"
        assert error(found) < (1e-5 if dtype == "float32" else AGREEING[dtype] / 2)


def test_log_probabilities_that_are_told_too_low_show(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sample = engine_module.sample  # type: ignore[attr-defined]
    with ground(tmp_path) as one:
        monkeypatch.setattr(engine_module, "sample", lambda *given: (sample(*given)[0], sample(*given)[1] - 0.01))
        assert error(begun(one, Sampling(max_tokens=40), 12).look_back(64).sampled) == pytest.approx(0.01, rel=1e-3)


def test_tokens_of_the_version_in_use_alone_are_compared(tmp_path: Path) -> None:
    with ground(tmp_path) as one:
        engine = begun(one, Sampling(max_tokens=40), 12)
        one.learn()
        one.publish()
        one.load()
        assert engine.look_back(64).sampled == ()
        for _ in range(3):
            engine.step()
        found = engine.look_back(64).sampled
        assert len(found) == 3 * 2 * len(PROMPTS)
        assert error(found) < 1e-5


def test_no_completion_is_changed_by_it(tmp_path: Path) -> None:
    sampled = []
    for again in (False, True):
        with ground(tmp_path / str(again)) as one:
            engine, ended = begun(one, Sampling(max_tokens=20), 5), []
            while not engine.idle:
                if again:
                    engine.look_back(64)
                ended += engine.step()
            engine.check_integrity()
            sampled.append(sorted(ended, key=lambda one: (one.request, one.member)))
    assert sampled[0] == sampled[1]


def test_an_idle_engine_has_nothing_to_compare(tmp_path: Path) -> None:
    with ground(tmp_path) as one:
        one.publish()
        one.load()
        assert one.engine.look_back(64).sampled == ()


def test_texts_in_one_pass_have_the_logits_of_each_alone(tmp_path: Path) -> None:
    with ground(tmp_path) as one:
        policy = DecodePolicy(one.engine._policy.model)
        texts = [np.array(text, np.int64) for text in ((5,), (6, 7, 8, 9), tuple(range(2, 12)) * 7, (3, 4))]
        together = policy.forward_of_texts(texts)
        alone = [policy.forward_of_texts([text]) for text in texts]
        decoded = policy.forward_of_text(texts[1], 2)
        torch.testing.assert_close(together, torch.cat(alone), atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(together[1:5], decoded, atol=1e-4, rtol=1e-4)
        assert not len(policy)


def test_with_kept_caches_only_tokens_over_a_context_of_their_own_version_are_compared(tmp_path: Path) -> None:
    with ground(tmp_path, on_update="keep") as one:
        engine = begun(one, Sampling(max_tokens=60, stop_token_ids=()), 5)
        for step in range(6):
            one.advance()
            engine.add(
                GenerateRequest(f"n{step}", (9, 8, step + 2), (step,), Sampling(max_tokens=60, stop_token_ids=()))
            )
            for _ in range(4):
                engine.step()
            found = engine.look_back(64).sampled
            assert len(found) == 4, "of the completion that began with this version"
            assert error(found) < 1e-5
            engine.abort(f"n{step}")
    assert one.said == []


def test_with_kept_caches_a_context_that_was_computed_again_is_compared_from_there_on(tmp_path: Path) -> None:
    with ground(tmp_path, on_update="keep") as one:
        engine = begun(one, Sampling(max_tokens=60, stop_token_ids=()), 5)
        one.advance()
        for _ in range(3):
            engine.step()
        assert engine.look_back(64).sampled == ()
        engine.limit(0)  # every row is preempted
        engine.limit(engine._config.cache_bytes)
        for _ in range(2):
            engine.step()
        found = engine.look_back(64).sampled
        assert len(found) == 2 * 2 * len(PROMPTS)
        assert error(found) < 1e-5


def test_with_kept_caches_logprobs_that_are_told_too_low_show(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sample = engine_module.sample  # type: ignore[attr-defined]
    with ground(tmp_path, on_update="keep") as one:
        monkeypatch.setattr(engine_module, "sample", lambda *given: (sample(*given)[0], sample(*given)[1] - 0.01))
        engine = begun(one, Sampling(max_tokens=60, stop_token_ids=()), 5)
        one.advance()
        engine.add(GenerateRequest("n", (9, 8), tuple(range(6)), Sampling(max_tokens=60, stop_token_ids=())))
        for _ in range(6):
            engine.step()
        assert error(engine.look_back(64).sampled) == pytest.approx(0.01, rel=1e-2)


def step_of(version: int, completions: Sequence[Completion]) -> Batch:
    """The completions as a batch of this version."""
    verdict = Verdict(outcome=Outcome.RIGHT, reward=1.0)
    groups = []
    for at, done in enumerate(completions):
        whole = Trajectory(f"{at}/0", (done.written_by(NAME, Segment()).segment,), verdict, "")
        prompt = Prompt(id=f"{at}", token_ids=BEGUN[done.request], text="", answer="")
        groups.append(Group(id=f"{at}", prompt=prompt, admitted_version=0, trajectories=(whole,)))
    return Batch(step=version, version=version, groups=tuple(groups), oldest_trainable=0)


@pytest.mark.parametrize("on_update", ["recompute", "keep"])
@pytest.mark.parametrize("lie", [0.0, 0.01])
def test_the_trainer_judges_by_the_same_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on_update: Literal["recompute", "keep"], lie: float
) -> None:
    sample = engine_module.sample  # type: ignore[attr-defined]
    monkeypatch.setattr(engine_module, "sample", lambda *given: (sample(*given)[0], sample(*given)[1] - lie))
    with ground(tmp_path, on_update=on_update) as one:
        engine, ended = begun(one, Sampling(max_tokens=12, stop_token_ids=()), 5), list[Completion]()
        one.advance()
        engine.add(GenerateRequest("n", (9, 8), (1, 2), Sampling(max_tokens=12, stop_token_ids=())))
        while not engine.idle:
            ended += engine.step()
        one.trainer.train(step_of(one.trainer.version, ended))
        (found,) = one.trainer.agreement
        interrupted = 2 * len(PROMPTS) * (12 - 5)
        assert found.tokens == 2 * 12 + (interrupted if on_update == "recompute" else 0)
        assert found.error == pytest.approx(lie, abs=1e-5)
