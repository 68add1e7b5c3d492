"""Promises: the value loss by hand; values before the first step are zero, so it is the step without a critic; the fit
is its equation written out, whatever the packing; a resumed critic goes on bit for bit.
"""

import copy
from pathlib import Path

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedModel

from stretto.core.errors import StoreError
from stretto.core.records import Batch, Sampling, StopReason, Trajectory
from stretto.model.packed.attention import PACKED_ATTENTION
from stretto.model.packed.logprobs import hidden_states, pack_tokens
from stretto.trainer.batch.minibatch import minibatch
from stretto.trainer.batch.samples import Sample, samples_of
from stretto.trainer.config import CriticConfig, TrainerConfig
from stretto.trainer.critic import Critic, explained_variance, value_loss
from stretto.trainer.objective.algorithm import AlgorithmConfig
from stretto.trainer.objective.estimators import ESTIMATORS
from stretto.trainer.trainer import Trainer
from tests.tolerances import EPS, LOGITS, RATE, assert_close, near
from tests.trainer.batches import LONGEST, adamw, assert_same, batch
from tests.trainer.tiny import BACKWARD, FORWARD, tiny

SETTINGS = CriticConfig(learning_rate=RATE, clip=0.05)
CONFIG = TrainerConfig(learning_rate=RATE, eps=EPS, minibatches=2, weight_decay=0.1, max_grad_norm=0.7)
ALGORITHM = AlgorithmConfig(advantages=ESTIMATORS("gae", gamma=0.9, lam=0.8, critic=SETTINGS))
ALONE = AlgorithmConfig(advantages=ESTIMATORS("gae", gamma=0.9, lam=0.8))
SAMPLING = Sampling(max_tokens=LONGEST)


def knowing(config: TrainerConfig = CONFIG) -> Critic:
    """A critic whose head is no longer zero."""
    critic = Critic(tiny(), config, SETTINGS)
    with torch.no_grad():
        critic._values.head.weight.copy_(torch.linspace(-0.5, 0.5, 16))
        critic._values.head.bias.fill_(0.3)
    return critic


def trainer(tokens: int = 24) -> Trainer:
    config = CONFIG.model_copy(update={"micro_batch_tokens": tokens})
    return Trainer(tiny(), config, ALGORITHM, SAMPLING, critic=Critic(tiny(), config, SETTINGS))


def test_the_value_loss_by_hand() -> None:
    # V = 1, before 0.5, clip 0.2: near 0.7. R = 2: max(1, 1.69) / 2; R = 0: max(1, 0.49) / 2; V = 0.6 is near: 0.16 / 2
    values = torch.tensor([1.0, 1.0, 0.6], requires_grad=True)
    losses = value_loss(values, torch.full((3,), 0.5), torch.tensor([2.0, 0.0, 1.0]), clip=0.2)
    losses.sum().backward()
    assert losses.tolist() == near([0.845, 0.5, 0.08])
    assert values.grad is not None
    assert values.grad.tolist() == near([0.0, 1.0, -0.4])  # a value that is ahead of its clip does not run on


@given(st.lists(st.tuples(*[st.floats(-3, 3)] * 3), min_size=1, max_size=6))
def test_a_clip_that_is_never_reached_is_the_squared_error(rows: list[tuple[float, ...]]) -> None:
    values, before, returns = (torch.tensor(column) for column in zip(*rows, strict=True))
    squares = (values - returns).square() / 2  # of gaps up to 6
    assert_close(value_loss(values, before, returns, clip=10.0), squares, size=6**2 / 2)


def test_the_explained_variance_by_hand() -> None:
    # returns 0 and 4: variance 4; errors 1 and -1: variance 1
    assert explained_variance([1.0, 3.0], [0.0, 4.0]) == near(0.75)


def test_before_its_first_step_a_critic_changes_nothing() -> None:
    config = CONFIG.model_copy(update={"minibatches": 1})
    without = Trainer(tiny(), config, ALONE, SAMPLING)
    with_one = Trainer(tiny(), config, ALGORITHM, SAMPLING, critic=Critic(tiny(), config, SETTINGS))
    for version in range(2):
        without.train(batch(version))
        update = with_one.train(batch(version))
        if version == 0:
            assert_same(without.learner.model, with_one.learner.model, steps=1)
            assert update.metrics["explained_variance"] == 0
    weights = [next(iter(one.learner.model.parameters())) for one in (without, with_one)]
    assert not torch.equal(*weights)


def plain_values(body: PreTrainedModel, head: torch.nn.Linear, ids: tuple[int, ...]) -> Tensor:
    """V of the state after each token, no packing of several."""
    values: Tensor = head(hidden_states(body, pack_tokens([ids]))).squeeze(-1)
    return values


@pytest.mark.parametrize("tokens", [1, 24])
def test_a_fit_is_its_equation_written_out(tokens: int) -> None:
    config = CONFIG.model_copy(update={"micro_batch_tokens": tokens})
    critic = knowing(config)
    samples = samples_of(batch(0), ALGORITHM, LONGEST, critic.token_values(batch(0))).samples
    plain = copy.deepcopy(critic.trained)
    optimizer = adamw(plain)  # type: ignore[arg-type]
    for _ in range(2):  # the second step starts with values that have moved
        total = torch.stack([written_out(plain, sample) for sample in samples]).sum()
        loss = total / sum(len(sample.returns) for sample in samples)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.7)
        optimizer.step()
        part = minibatch(samples, config, "token_mean", LONGEST, torch.device("cpu"))
        seen, stepped = critic.fit(part, 0, version=0)
        assert stepped.taken
        assert float(seen) == near(float(loss.detach()), BACKWARD)
    assert_same(critic.trained, plain, steps=2)  # type: ignore[arg-type]


def written_out(critic: torch.nn.Module, sample: Sample) -> Tensor:
    values = plain_values(critic.body, critic.head, sample.token_ids)  # type: ignore[arg-type]
    total = torch.zeros(())
    for place, before, target in zip(sample.loss_positions, sample.values, sample.returns, strict=True):
        v = values[place - 1]
        near = before + (v - before).clamp(-0.05, 0.05)
        total = total + torch.maximum((v - target) ** 2, (near - target) ** 2) / 2
    return total


def test_returns_are_advantages_plus_values() -> None:
    values = knowing().token_values(batch(5))
    samples = samples_of(batch(5, oldest_trainable=5), ALGORITHM, LONGEST, values).samples
    assert any(len(sample.returns) < len(values[sample.id]) for sample in samples)
    for sample in samples:
        assert tuple(sample.returns) == pytest.approx(
            [a + v for a, v in zip(sample.advantages, sample.values, strict=True)]
        )
        assert tuple(sample.values) == tuple(
            values[sample.id][-len(sample.values) :]
        )  # the tokens that are too old come first


def test_normalised_advantages_leave_the_returns_alone() -> None:
    values = knowing().token_values(batch(0))
    plain = samples_of(batch(0), ALGORITHM, LONGEST, values).samples
    whitened = AlgorithmConfig(advantages=ESTIMATORS("gae", gamma=0.9, lam=0.8, critic=SETTINGS, normalised=True))
    samples = samples_of(batch(0), whitened, LONGEST, values).samples
    assert [tuple(sample.returns) for sample in samples] == [tuple(sample.returns) for sample in plain]
    scores = torch.tensor([a for sample in samples for a in sample.advantages], dtype=torch.float64)
    assert float(scores.mean()) == pytest.approx(0, abs=1e-9)
    assert float(scores.std(correction=0)) == pytest.approx(1, abs=1e-4)


def test_a_resumed_critic_goes_on_bit_for_bit(tmp_path: Path) -> None:
    straight, resumed = trainer(), trainer()
    straight.train(batch(0))
    straight.save_checkpoint(tmp_path / "v1")
    resumed.load_checkpoint(tmp_path / "v1")
    for version in range(1, 3):
        straight.train(batch(version))
        resumed.train(batch(version))
    assert_same(straight.learner.model, resumed.learner.model)


def test_a_checkpoint_without_a_critic_is_refused_by_a_trainer_that_has_one(tmp_path: Path) -> None:
    Trainer(tiny(), CONFIG, ALONE, SAMPLING).save_checkpoint(tmp_path / "v0")
    with pytest.raises(StoreError, match="critic cannot be read"):
        trainer().load_checkpoint(tmp_path / "v0")


def test_a_critic_is_given_exactly_where_it_is_needed() -> None:
    with pytest.raises(ValueError, match="needs a critic"):
        Trainer(tiny(), CONFIG, ALGORITHM, SAMPLING)
    with pytest.raises(ValueError, match="nothing else does"):
        Trainer(tiny(), CONFIG, ALONE, SAMPLING, critic=knowing())


CUT_OFF = AlgorithmConfig(
    advantages=ESTIMATORS("gae", gamma=0.9, lam=0.8, critic=SETTINGS.model_copy(update={"truncated": "bootstrap"}))
)


def ended(given: Batch, which: int) -> Batch:
    """The batch, with every answer cut off but those of this number, which end by themselves."""

    def member(t: Trajectory) -> Trajectory:
        (segment,) = t.segments
        ends = msgspec.structs.replace(segment, stop_reason=StopReason.STOP)
        return msgspec.structs.replace(t, segments=(ends,)) if t.member == which else t

    groups = [msgspec.structs.replace(g, trajectories=tuple(map(member, g.trajectories))) for g in given.groups]
    return msgspec.structs.replace(given, groups=tuple(groups))


@pytest.mark.parametrize("tokens", [1, 24, 10_000])
def test_only_answers_that_were_cut_off_have_a_value_after_their_last_token(tokens: int) -> None:
    given = ended(batch(0), which=1)
    critic = knowing(CONFIG.model_copy(update={"micro_batch_tokens": tokens}))
    plain = critic.token_values(given)
    critic._truncated = "bootstrap"
    values = critic.token_values(given)
    for group in given.groups:
        for t in group.trajectories:
            ids = group.prompt.token_ids + t.token_ids
            alone = plain_values(critic._values.body, critic._values.head, ids)[
                len(group.prompt.token_ids) - 1 :
            ].tolist()
            assert plain[t.id] == near(alone[:-1], FORWARD, size=LOGITS)
            assert values[t.id] == near(alone[:-1] if t.member == 1 else alone, FORWARD, size=LOGITS)


def test_the_last_state_of_an_answer_that_fills_the_context_has_a_value() -> None:
    """Of learned positions there is none for a token more."""
    given = batch(0)
    fullest = max(len(g.prompt.token_ids) + len(t.token_ids) for g in given.groups for t in g.trajectories)
    shape = GPT2Config(vocab_size=13, n_embd=16, n_layer=1, n_head=2, n_positions=fullest)
    model = GPT2LMHeadModel._from_config(shape, attn_implementation=PACKED_ATTENTION)
    critic = Critic(model, CONFIG, SETTINGS.model_copy(update={"truncated": "bootstrap"}))
    with torch.no_grad():
        critic._values.head.weight.copy_(torch.linspace(-0.5, 0.5, 16))
    values = critic.token_values(given)
    for group in given.groups:
        for t in group.trajectories:
            ids = group.prompt.token_ids + t.token_ids
            alone = plain_values(critic._values.body, critic._values.head, ids)[len(group.prompt.token_ids) - 1 :]
            assert values[t.id] == near(alone.tolist(), FORWARD, size=LOGITS)


def test_an_answer_that_was_cut_off_bootstraps_from_its_last_state() -> None:
    given, critic = ended(batch(0), which=1), knowing()
    without = {one.id: one for one in samples_of(given, ALGORITHM, LONGEST, critic.token_values(given)).samples}
    critic._truncated = "bootstrap"
    values = critic.token_values(given)
    for sample in samples_of(given, CUT_OFF, LONGEST, values).samples:
        length = len(sample.advantages)
        after = values[sample.id][length] if len(values[sample.id]) > length else 0.0
        # the last delta grows by gamma V, and so does the advantage t tokens before by (gamma lam)^t of that
        gains = [0.9 * after * 0.72 ** (length - 1 - t) for t in range(length)]
        expected = [a + g for a, g in zip(without[sample.id].advantages, gains, strict=True)]
        assert tuple(sample.advantages) == near(expected, FORWARD, size=LOGITS)
        assert len(sample.values) == len(sample.returns) == length
        assert (after == 0.0) == sample.id.endswith("/1")


def test_a_trainer_whose_critic_bootstraps_learns_something_else() -> None:
    bootstrapping = CUT_OFF.critic
    assert bootstrapping is not None
    trainers = [
        Trainer(tiny(), CONFIG, algorithm, SAMPLING, critic=Critic(tiny(), CONFIG, settings))
        for algorithm, settings in ((ALGORITHM, SETTINGS), (CUT_OFF, bootstrapping))
    ]
    for one in trainers:
        for version in range(2):  # before its first step a critic says 0 of every state
            one.train(batch(version))
    weights = [next(iter(one.learner.model.parameters())) for one in trainers]
    assert not torch.equal(*weights)
