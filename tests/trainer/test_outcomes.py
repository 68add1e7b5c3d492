"""Promises of what is recorded of single tokens: each outcome by hand; the counts are those of the step's metrics, for
every loss and correction; log-probabilities are those of the policy before the step; each token stands in its place,
whatever the turns; a step that is trained again has the same bytes; a disk that fails or hangs ends no training.
"""

import math
import os
import time
from collections.abc import Iterable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from stretto.store.config import TokensConfig
from stretto.store.series.tokens import SampledTokens, TokenOutcome, read_tokens, tokens_file
from stretto.trainer.batch.samples import samples_of
from stretto.trainer.config import TrainerConfig
from stretto.trainer.messages import TokensSpec
from stretto.trainer.objective import corrections, decoupled_ppo, surrogates
from stretto.trainer.objective.algorithm import AlgorithmConfig
from stretto.trainer.objective.estimators import ESTIMATORS
from stretto.trainer.objective.losses import Objective, evaluate
from stretto.trainer.outcomes import TokenWriter, TrainedTokens, outcomes
from stretto.trainer.trainer import Trainer
from tests.tolerances import EPS, LOGITS, RATE, near
from tests.trainer.batches import LONGEST, batch, sample_logprobs
from tests.trainer.packed_tokens import logs, tokens
from tests.trainer.rank_runs import LOSSES, divided
from tests.trainer.test_samples import FIRST, SECOND, TOOL
from tests.trainer.test_samples import batch as conversation
from tests.trainer.tiny import FORWARD, tiny

#: Large updates, so that later minibatches of a step clip.
CONFIG = TrainerConfig(learning_rate=RATE, eps=1e-5, minibatches=3, micro_batch_tokens=24)
IN_LOSS, BOUNDED, CORRECTED, WEIGHTLESS = TokenOutcome
CORRECTIONS = (
    {"kind": "mask", "low": 0.5, "high": 2.0},
    {"kind": "truncate", "high": 1.5},
    {"kind": "kpop", "threshold": 0.1},
    {"kind": "sequence_mask", "low": 0.7, "high": 1.5},
    "none",
)
ALGORITHMS = [{"loss": loss} for loss in LOSSES] + [{"correction": one} for one in CORRECTIONS]


class Kept:
    """Keeps the tokens of every step in memory."""

    def __init__(self) -> None:
        self.steps: list[TrainedTokens] = []

    def keeps(self, step: int) -> bool:
        return True

    def take(self, tokens: TrainedTokens) -> None:
        self.steps.append(tokens)

    def last(self) -> dict[str, SampledTokens]:
        """Of the last step, by trajectory."""
        return divided(*self.steps[-1].sampled())


def writer(folder: Path, **config: object) -> TokenWriter:
    return TokenWriter(spec(folder, **config), rank=0)


def spec(folder: Path, **config: object) -> TokensSpec:
    return TokensSpec(folder=str(folder), config=TokensConfig.model_validate(config).model_dump_json())


def count(records: Iterable[SampledTokens], outcome: TokenOutcome) -> int:
    return sum(int(np.count_nonzero(record.outcome & outcome)) for record in records)


def test_the_outcomes_of_a_clip_and_a_mask_by_hand() -> None:
    objective = Objective(
        partial(decoupled_ppo.ppo, clip_low=0.2, clip_high=0.2), partial(corrections.mask, low=0.5, high=5.0)
    )
    # w = anchor / behavior:  2     2     9     0.2   9      u = policy / anchor:  1.25, 0.5, 1, 1, 1.5
    anchor, behavior = logs(0.4, 0.4, 0.9, 0.1, 0.45), logs(0.2, 0.2, 0.1, 0.5, 0.05)
    policy = logs(0.5, 0.2, 0.9, 0.1, 0.675)
    # A = 1: 1.25 is clipped at 1.2. A = -1: of 0.5, min(-0.5, -0.8) is the clipped one. The third and the fourth
    # have no weight, the fifth has none and is clipped too.
    loss = evaluate(objective, policy, tokens([1.0, -1.0, 1.0, 1.0, 1.0], anchor, behavior=behavior))
    masked = IN_LOSS | CORRECTED | WEIGHTLESS
    assert outcomes(loss).tolist() == [IN_LOSS | BOUNDED, IN_LOSS | BOUNDED, masked, masked, masked | BOUNDED]
    assert loss.ratio.tolist() == near([1.25, 0.5, 1.0, 1.0, 1.5])


def test_a_truncated_weight_is_corrected_and_not_gone() -> None:
    objective = Objective(surrogates.policy_gradient, partial(corrections.truncate, high=2.5))
    given = tokens([1.0, 1.0], logs(0.4, 0.9), behavior=logs(0.2, 0.1))  # w = 2, 9
    assert outcomes(evaluate(objective, logs(0.4, 0.9), given)).tolist() == [IN_LOSS, IN_LOSS | CORRECTED]


def test_what_is_decided_for_a_completion_is_the_outcome_of_each_of_its_tokens() -> None:
    objective = Objective(
        partial(surrogates.gspo, clip_low=0.2, clip_high=0.2), partial(corrections.sequence_mask, low=0.5, high=2.0)
    )
    anchor = logs(0.2, 0.2, 0.8, 0.8, 0.4)
    # Geometric means: of w 1, sqrt(8 * 2) = 4 and 1; of u sqrt(2 * 1) = 1.41 > 1.2, 1, and 0.5 < 0.8 with A = 1.
    behavior, policy = logs(0.2, 0.2, 0.1, 0.4, 0.4), logs(0.4, 0.2, 0.8, 0.8, 0.2)
    loss = evaluate(objective, policy, tokens([1.0] * 5, anchor, behavior=behavior, lengths=[2, 2, 1]))
    masked = IN_LOSS | CORRECTED | WEIGHTLESS
    assert outcomes(loss).tolist() == [IN_LOSS | BOUNDED, IN_LOSS | BOUNDED, masked, masked, IN_LOSS]
    assert loss.ratio.tolist() == near([math.sqrt(2)] * 2 + [1.0, 1.0, 0.5])


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=str)
def test_the_records_of_a_step_count_what_its_metrics_say(algorithm: dict[str, object]) -> None:
    kept = Kept()
    given = batch(2, oldest_trainable=1)
    update = Trainer(tiny(), CONFIG, AlgorithmConfig.model_validate(algorithm), version=2, sink=kept).train(given)
    records = kept.last().values()
    trained = count(records, IN_LOSS)
    assert list(kept.last()) == [t.id for group in given.groups for t in group.trajectories]
    assert trained == update.trained_tokens
    assert sum(len(record.outcome) for record in records) - trained == update.masked_tokens > 0
    assert count(records, BOUNDED) == round(update.metrics["clip_fraction"] * trained)
    assert count(records, CORRECTED) == round(update.metrics["capped_fraction"] * trained)
    assert count(records, WEIGHTLESS) <= count(records, CORRECTED)
    ratios = np.concatenate([record.ratio for record in records])
    assert np.nanmean(ratios, dtype=np.float64) == pytest.approx(update.metrics["ratio_mean"], rel=1e-5)


def test_log_probabilities_are_those_of_the_policy_before_the_step() -> None:
    model, kept, given = tiny(), Kept(), batch(0)
    with torch.no_grad():
        before = {s.id: sample_logprobs(model, s)[0] for s in samples_of(given, AlgorithmConfig(), LONGEST).samples}
    metrics = Trainer(model, CONFIG, AlgorithmConfig(), sink=kept).train(given).metrics
    logged = {t.id: np.array(t.segments[0].behavior_logprobs) for group in given.groups for t in group.trajectories}
    differences = [record.trainer_logprob - logged[id] for id, record in kept.last().items()]
    assert metrics["behavior_logprob_error"] == pytest.approx(np.abs(np.concatenate(differences)).mean(), rel=1e-5)
    for id, record in kept.last().items():
        assert record.trainer_logprob.tolist() == near(before[id].tolist(), FORWARD, size=LOGITS)


def test_without_a_policy_before_the_step_only_the_first_minibatch_has_its_log_probabilities() -> None:
    kept = Kept()
    Trainer(tiny(), CONFIG, AlgorithmConfig.model_validate({"loss": "ppo"}), sink=kept).train(batch(0))
    known = [bool(np.isfinite(record.trainer_logprob).all()) for record in kept.last().values()]
    unknown = [bool(np.isnan(record.trainer_logprob).all()) for record in kept.last().values()]
    assert 0 < sum(known) < len(known)
    assert sum(known) + sum(unknown) == len(known)
    assert all(np.isfinite(record.ratio).all() for record in kept.last().values())


def test_the_tokens_of_several_turns_and_of_a_branch_stand_in_the_order_of_their_segments() -> None:
    # versions 5 6 | 6 7, and a branch from the prompt with 6 7; tokens of version 5 are too old
    branch = type(SECOND).of((6,), (-0.25,), (7,), stop_reason=SECOND.stop_reason, parent=-1)
    kept, config = Kept(), CONFIG.model_copy(update={"minibatches": 1})
    algorithm = AlgorithmConfig(advantages=ESTIMATORS("reward", credit="turn"))
    given = conversation((FIRST, TOOL, SECOND, branch), oldest_trainable=6)
    Trainer(tiny(), config, algorithm, version=7, sink=kept).train(given)
    (record,) = kept.last().values()
    sampled = {one.id: sample_logprobs(tiny(), one)[0].tolist() for one in samples_of(given, algorithm, 8).samples}
    assert record.outcome.tolist() == [0, 1, 1, 1, 1]
    assert record.trainer_logprob.tolist()[1:] == near([*sampled["g/0"], *sampled["g/0:1"]], FORWARD, size=LOGITS)
    assert [math.isnan(column[0]) for column in (record.trainer_logprob, record.ratio, record.advantage)] == [True] * 3


def test_a_step_without_loss_tokens_is_on_record_too() -> None:
    kept = Kept()
    Trainer(tiny(), CONFIG, AlgorithmConfig(), version=2, sink=kept).train(batch(2, oldest_trainable=9))
    assert [count([record], IN_LOSS) for record in kept.last().values()] == [0] * 12


def test_a_step_that_is_trained_again_after_a_resume_writes_the_same_bytes(tmp_path: Path) -> None:
    config = TrainerConfig(learning_rate=RATE, eps=EPS, minibatches=3)

    def trainer(sink: TokenWriter) -> Trainer:
        return Trainer(tiny(), config, AlgorithmConfig(), sink=sink)

    first = writer(tmp_path / "first")
    straight = trainer(first)
    straight.save_checkpoint(tmp_path / "v0")
    for version in range(2):
        straight.train(batch(version))
    again = writer(tmp_path / "again")
    resumed = trainer(again)
    resumed.load_checkpoint(tmp_path / "v0")
    for version in range(2):
        resumed.train(batch(version))
    for one in (first, again):
        one.finish()
    for step in range(2):
        assert tokens_file(tmp_path / "again", step).read_bytes() == tokens_file(tmp_path / "first", step).read_bytes()
    (record,) = read_tokens(tmp_path / "first", 1, ["0/3"]).values()
    assert len(record.outcome) == len(batch(1).groups[0].trajectories[3].segments[0].token_ids)


def test_a_disk_that_fails_is_a_logs_line_and_ends_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "tokens").touch()
    sink = writer(tmp_path / "tokens")
    assert Trainer(tiny(), CONFIG, AlgorithmConfig(), sink=sink).train(batch(0)).version == 1
    sink.finish()
    assert "the tokens of step 0 are not on record" in capsys.readouterr().err


def test_a_disk_that_hangs_is_waited_for_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kept = Kept()
    Trainer(tiny(), CONFIG, AlgorithmConfig(), sink=kept).train(batch(0))
    hanging = tmp_path / f".{tokens_file(tmp_path, 0).name}.{os.getpid()}.part"
    os.mkfifo(hanging)  # to open it hangs until somebody reads
    patience, later = 0.5, 40
    sink = TokenWriter(spec(tmp_path), rank=0, patience=patience)
    start = time.monotonic()
    for _ in range(1 + later):
        sink.take(kept.steps[0])
    assert time.monotonic() - start < patience * later
    assert capsys.readouterr().err.count("not written after 0.5 s") == later
    hanging.read_bytes()


def test_every_nth_step_is_kept_or_all_or_none(tmp_path: Path) -> None:
    assert [step for step in range(1, 8) if writer(tmp_path, tokens=3).keeps(step)] == [3, 6]
    assert writer(tmp_path, tokens="all").keeps(1)
    assert not writer(tmp_path, tokens="none").keeps(1)
