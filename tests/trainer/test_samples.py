"""Promises: a sample holds the loss tokens that are young enough, with everything logged about them; the others are
context; impossible answers stop the run. Of a trajectory that branches, and about whom a reward is for:

- By hand: each path is a sample, a token that several paths share is trained in the first and context in the others.
- A step on it is, bit for bit, the step on its paths as trajectories of their own.
- In any forest every sampled token is a loss token of exactly one sample, behind exactly the tokens that it was sampled
  behind; a linear trajectory makes the one sample that it always made.
- Two turns have the loss and the gradient of the same tokens as two samples of a single turn with the same context.
- With credit by turn, a turn has the rewards of its own and of later turns of its path, compared with the turns of the
  same number in the group.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedModel

from stretto.core.errors import BoundViolated
from stretto.core.forest import way_to
from stretto.core.records import (
    NOTHING,
    Batch,
    Group,
    Outcome,
    Prompt,
    Sampling,
    Segment,
    StopReason,
    Trajectory,
    Verdict,
)
from stretto.core.records import PROMPT as BEHIND_PROMPT
from stretto.model.packed.logprobs import pack_tokens, token_logprobs
from stretto.trainer.batch.minibatch import minibatch, score_tokens
from stretto.trainer.batch.samples import Sample, samples_of
from stretto.trainer.config import CriticConfig, OptimizerConfig, TrainerConfig
from stretto.trainer.objective.advantages import Shaping
from stretto.trainer.objective.aggregation import Aggregation
from stretto.trainer.objective.algorithm import AlgorithmConfig, ReferenceConfig
from stretto.trainer.objective.estimators import ESTIMATORS
from stretto.trainer.objective.losses import evaluate, objective
from stretto.trainer.objective.tokens import LossTokens
from stretto.trainer.optimizer import Learner
from stretto.trainer.trainer import Trainer
from tests.tolerances import LOGITS, assert_close, near
from tests.trainer.tiny import BACKWARD, FORWARD, tiny

PROMPT = Prompt(id="0", token_ids=(5, 12), text="", answer="")
LONGEST = 8
GROUP_MEAN = AlgorithmConfig(advantages=ESTIMATORS("group_mean"))
CPU = torch.device("cpu")

#: Two turns and what a tool says between them; sampled are places 2, 3 and 7, 8.
FIRST = Segment.of((4, 9), (-0.5, -1.0), (5, 6), stop_reason=StopReason.STOP)
TOOL = Segment.of((7, 7, 3))
SECOND = Segment.of((8, 2), (-1.5, -2.0), (6, 7), stop_reason=StopReason.STOP)


def turn(*tokens: int, parent: int | None = None, reward: float | None = None) -> Segment:
    logprobs, versions = tuple(-0.5 * token for token in tokens), (6,) * len(tokens)
    return Segment.of(tokens, logprobs, versions, stop_reason=StopReason.STOP, parent=parent, reward=reward)


BRANCHES = (
    turn(4, 9), Segment.of((7,)), turn(8), Segment.of((3,), parent=0, cause="history_rewritten"), turn(2, 6),
    Segment.of((11,), parent=NOTHING, cause="subagent"), turn(1),
)  # fmt: skip


def batch(*members: Sequence[Segment], rewards: Sequence[float] = (1.0,), oldest_trainable: int = 0) -> Batch:
    verdicts = [Verdict(outcome=Outcome.RIGHT, reward=reward) for reward in rewards]
    pairs = enumerate(zip(members, verdicts, strict=True))
    trajectories = tuple(Trajectory(f"g/{k}", tuple(segments), verdict, "") for k, (segments, verdict) in pairs)
    group = Group(id="g", prompt=PROMPT, admitted_version=5, trajectories=trajectories)
    return Batch(step=8, version=7, groups=(group,), oldest_trainable=oldest_trainable)


def answer(versions: tuple[int, ...] = (5, 6, 7)) -> tuple[Segment]:
    count = len(versions)
    columns = (4, 4, 2)[:count], (-0.1, -0.7, -0.02)[:count], versions
    return (Segment.of(*columns, stop_reason=StopReason.STOP),)


def test_the_example_of_the_docstring() -> None:
    samples = samples_of(batch(answer(), answer(), rewards=(1.0, 0.0), oldest_trainable=6), GROUP_MEAN, LONGEST)
    expected = Sample("g/0", (5, 12, 4, 4, 2), 2, (3, 4), (-0.7, -0.02), (1, 0), (0.5, 0.5))
    assert samples.samples == (expected, replace(expected, id="g/1", advantages=(-0.5, -0.5)))
    assert (samples.masked_tokens, samples.reward_mean) == (2, 0.5)


def test_each_group_has_its_own_oldest_version() -> None:
    """Versions 5, 6, 7; the batch masks what is older than 6, this group what is older than 7."""
    stricter = msgspec.structs.replace(batch(answer(), oldest_trainable=6), oldest_by_group={"g": 7})
    samples = samples_of(stricter, GROUP_MEAN, LONGEST)
    assert (tuple(samples.samples[0].loss_positions), samples.masked_tokens) == ((4,), 2)


def test_answers_without_loss_tokens_make_no_row_but_count_in_the_group() -> None:
    given = batch(answer((3, 3, 3)), answer(()), answer(), rewards=(1.0, 0.0, 0.5), oldest_trainable=5)
    samples = samples_of(given, GROUP_MEAN, LONGEST)
    assert len(samples.samples) == 1
    assert tuple(samples.samples[0].advantages) == (0.0, 0.0, 0.0)
    assert samples.masked_tokens == 3


def test_a_token_from_the_future_stops_the_run() -> None:
    with pytest.raises(BoundViolated, match="version 8"):
        samples_of(batch(answer((7, 7, 8))), GROUP_MEAN, LONGEST)


def test_a_flipped_byte_stops_the_run() -> None:
    (whole,) = answer()
    for at in range(len(whole.columns)):
        columns = bytearray(whole.columns)
        columns[at] ^= 16
        with pytest.raises(BoundViolated, match="no checksum fits"):
            samples_of(batch((msgspec.structs.replace(whole, columns=bytes(columns)),)), GROUP_MEAN, LONGEST)


def test_rewards_are_shaped_before_they_become_advantages_and_reported_as_they_were() -> None:
    # 3 of 4 tokens with a buffer of 2: half the penalty of 4, so (1 - 2 + 0.5) * 3 = -1.5
    shaping = Shaping(scale=3.0, bias=0.5, overlong_buffer=2, overlong_penalty=4.0)
    samples = samples_of(batch(answer()), AlgorithmConfig(advantages=ESTIMATORS("reward"), shaping=shaping), 4)
    assert tuple(samples.samples[0].advantages) == (-1.5, -1.5, -1.5)
    assert samples.reward_mean == 1.0


def test_a_discount_counts_from_the_end_of_the_whole_answer() -> None:
    config = AlgorithmConfig(advantages=ESTIMATORS("gae", gamma=0.5))
    samples = samples_of(batch(answer(), oldest_trainable=6), config, LONGEST)
    assert tuple(samples.samples[0].advantages) == (0.5, 1.0)


def test_each_branch_by_hand() -> None:
    sampled = samples_of(batch(BRANCHES), AlgorithmConfig(advantages=ESTIMATORS("reward")), LONGEST)
    assert sampled.samples == (
        Sample("g/0", (5, 12, 4, 9, 7, 8), 2, (2, 3, 5), (-2.0, -4.5, -4.0), (1, 1, 1), (1.0, 1.0, 1.0)),
        Sample("g/0:1", (5, 12, 4, 9, 3, 2, 6), 2, (5, 6), (-1.0, -3.0), (1, 1), (1.0, 1.0)),
        Sample("g/0:2", (11, 1), 0, (1,), (-0.5,), (1,), (1.0,)),
    )
    assert sampled.masked_tokens == 0
    (part,) = [minibatch(sampled.samples, OptimizerConfig(), "token_mean", LONGEST, CPU)]
    assert (part.ids, part.loss_tokens) == (("g/0",), 6)


def test_a_minibatch_reads_nothing_back_from_its_device() -> None:
    """A GPU would be waited for; the meta device has nothing to read."""
    samples = samples_of(batch(BRANCHES), AlgorithmConfig(advantages=ESTIMATORS("reward")), LONGEST).samples
    (made,) = minibatch(samples, OptimizerConfig(), "token_mean", LONGEST, torch.device("meta")).micro_batches
    assert made.scale.shape == made.packed.wanted.shape == (6,)


def test_a_trajectory_of_many_paths_counts_once_in_its_group() -> None:
    # rewards 1 and 0: their mean is 0.5, however many paths have them
    config = AlgorithmConfig(advantages=ESTIMATORS("group_mean"))
    samples = samples_of(batch(BRANCHES, (turn(4),), rewards=(1.0, 0.0)), config, LONGEST).samples
    assert {sample.id: set(sample.advantages) for sample in samples} == {
        "g/0": {0.5},
        "g/0:1": {0.5},
        "g/0:2": {0.5},
        "g/1": {-0.5},
    }


def test_a_prompt_of_a_loop_may_have_its_tokens_in_a_list() -> None:
    (group,) = (asked := batch(answer())).groups
    listed = msgspec.structs.replace(group, prompt=msgspec.structs.replace(PROMPT, token_ids=[5, 12]))
    found = samples_of(msgspec.structs.replace(asked, groups=(listed,)), AlgorithmConfig(), LONGEST)
    assert found.samples == samples_of(asked, AlgorithmConfig(), LONGEST).samples


def test_a_token_that_was_sampled_behind_nothing_stops_the_run() -> None:
    with pytest.raises(BoundViolated, match="sampled without any context"):
        samples_of(batch((turn(4, parent=NOTHING),)), AlgorithmConfig(), LONGEST)


def test_batch_scoring_scores_each_token_once_behind_its_own_history() -> None:
    learner = Learner(tiny(), OptimizerConfig())
    scores = score_tokens(batch(BRANCHES), 64, CPU, lambda packed: learner.logprobs(packed).logprobs)
    wanted = {"g/0": [2, 3, 5], "g/0:1": [5, 6], "g/0:2": [1]}
    for sample in samples_of(batch(BRANCHES), AlgorithmConfig(), LONGEST).samples:
        every = token_logprobs(tiny(), pack_tokens([sample.token_ids]), Sampling(max_tokens=1)).logprobs
        expected = every[[place - 1 for place in wanted[sample.id]]].tolist()
        assert scores[sample.id] == near(expected, FORWARD, size=LOGITS)


def test_the_state_behind_a_branch_that_was_cut_off_has_a_value() -> None:
    cut = Segment.of((2, 6), (-1.0, -3.0), (6, 6), stop_reason=StopReason.LENGTH)
    told = batch((*BRANCHES[:4], cut))
    scores = score_tokens(
        told,
        64,
        CPU,
        lambda packed: torch.zeros(len(packed.wanted)),
        continues=lambda path: path.stop_reason is StopReason.LENGTH,
    )
    assert {id: len(found) for id, found in scores.items()} == {"g/0": 3, "g/0:1": 3}
    config = AlgorithmConfig(advantages=ESTIMATORS("gae", gamma=0.5, critic=CriticConfig()))
    (_, second) = samples_of(told, config, LONGEST, {"g/0": [0.0] * 3, "g/0:1": [0.0, 0.0, 4.0]}).samples
    # delta = 1 + 0.5 * 4 = 3 at the last token, and 0.5 * 3 before it
    assert (tuple(second.advantages), tuple(second.returns)) == ((1.5, 3.0), (1.5, 3.0))


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "fixed_length"])
def test_a_step_on_branches_is_the_step_on_trajectories_that_are_their_paths_alone(aggregation: Aggregation) -> None:
    """Bit for bit: what an earlier path trains is given in the later ones; the subagent's is a prompt of its own."""
    config, algorithm = (
        TrainerConfig(learning_rate=3e-3, minibatches=2),
        AlgorithmConfig(advantages=ESTIMATORS("reward"), aggregation=aggregation),
    )
    told, shared = Segment.of((4, 9)), Segment.of((3,))
    linear = batch(BRANCHES[:3], (told, shared, BRANCHES[4]), rewards=(1.0, 1.0))
    other = batch((BRANCHES[6],)).groups[0]
    subagent = msgspec.structs.replace(other, id="h", prompt=Prompt(id="1", token_ids=(11,), text="", answer=""))
    apart = msgspec.structs.replace(linear, groups=(*linear.groups, renamed(subagent)))
    updates, weights = [], []
    for one in (batch(BRANCHES), apart):
        trainer = Trainer(tiny(), config, algorithm, Sampling(max_tokens=LONGEST), version=7)
        updates.append(trainer.train(one))
        weights.append(list(trainer.learner.model.parameters()))
    assert (updates[0].trained_tokens, updates[0].masked_tokens) == (6, 0)
    assert [update.metrics["loss"] for update in updates] == [updates[0].metrics["loss"]] * 2
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*weights, strict=True))
    assert not all(torch.equal(ours, before) for ours, before in zip(weights[0], tiny().parameters(), strict=True))


def renamed(group: Group) -> Group:
    members = enumerate(group.trajectories)
    own = tuple(msgspec.structs.replace(one, id=f"{group.id}/{k}") for k, one in members)
    return msgspec.structs.replace(group, trajectories=own)


@st.composite
def forests(draw: st.DrawFn) -> list[Segment]:
    """Every token has an id of its own, from 100 on."""
    segments, token = list[Segment](), 100
    for place in range(draw(st.integers(1, 7))):
        parent = draw(st.sampled_from([None, BEHIND_PROMPT, *range(place)]))
        tokens = tuple(range(token, token + draw(st.integers(1, 3))))
        token += len(tokens)
        versions = tuple(sorted(draw(st.lists(st.integers(4, 7), min_size=len(tokens), max_size=len(tokens)))))
        logged = (tuple(-float(one) for one in tokens), versions) if draw(st.booleans()) else ((), ())
        segments.append(Segment.of(tokens, *logged, parent=parent))
    return segments


@given(forests(), st.integers(4, 7))
def test_each_sampled_token_is_trained_once_behind_what_it_was_behind(segments: list[Segment], oldest: int) -> None:
    told = batch(segments, oldest_trainable=oldest)
    sampled = samples_of(told, AlgorithmConfig(advantages=ESTIMATORS("reward")), LONGEST)
    trained = Counter(sample.token_ids[place] for sample in sampled.samples for place in sample.loss_positions)
    young = [
        token
        for segment in segments
        for token, version in zip(segment.token_ids, segment.versions, strict=False)
        if version >= oldest
    ]
    assert trained == Counter(young)
    assert sampled.masked_tokens == sum(len(segment.versions) for segment in segments) - len(young)
    history = dict[int, tuple[int, ...]]()
    for place, segment in enumerate(segments):
        before = sum((segments[at].token_ids for at in way_to(segments, place)[1][:-1]), start=PROMPT.token_ids)
        for at, token in enumerate(segment.token_ids):
            history[token] = before + segment.token_ids[:at]
    for sample in sampled.samples:
        for place, logprob in zip(sample.loss_positions, sample.behavior_logprobs, strict=True):
            assert tuple(sample.token_ids[:place]) == history[sample.token_ids[place]]
            assert logprob == -sample.token_ids[place]


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 4)), min_size=1, max_size=5), st.integers(4, 7))
def test_a_linear_trajectory_makes_the_sample_that_it_always_made(shape: list[tuple[bool, int]], oldest: int) -> None:
    """Prompt and segments one after the other; what was given behind the last sampled token is left out."""
    last = max((at for at, (sampled, _) in enumerate(shape) if sampled), default=-1)
    shape = shape[: last + 1]
    segments = [turn(*range(length)) if sampled else Segment.of((9,) * length) for sampled, length in shape]
    samples = samples_of(
        batch(segments, oldest_trainable=oldest), AlgorithmConfig(advantages=ESTIMATORS("reward")), LONGEST
    )
    whole = Trajectory("g/0", tuple(segments), Verdict(outcome=Outcome.RIGHT, reward=1.0), "")
    origins = [sampled for sampled, length in shape for _ in range(length)]
    places = tuple(place for place, sampled in enumerate(origins, start=2) if sampled)
    expected = Sample(
        "g/0", (5, 12, *whole.token_ids), 2, places, whole.behavior_logprobs, (1,) * len(places), (1.0,) * len(places)
    )
    assert samples.samples == ((expected,) if places and oldest <= 6 else ())


def credited(*members: Sequence[Segment], rewards: Sequence[float], **advantages: object) -> list[tuple[float, ...]]:
    config = AlgorithmConfig.model_validate({"advantages": {"credit": "turn", **advantages}})
    return [tuple(one.advantages) for one in samples_of(batch(*members, rewards=rewards), config, LONGEST).samples]


GIVEN = Segment.of((9,))


def test_a_turn_has_its_own_reward_and_those_behind_it() -> None:
    # returns 3 = 1 + 2 and 2 of the first, 1 = 0 + 1 and 1 of the second, 5 alone; means 3 and 1.5 of each number
    first = (turn(4, 4, reward=1.0), GIVEN, turn(2, reward=2.0))
    second = (turn(4, reward=0.0), GIVEN, turn(2, 2, reward=1.0))
    third = (turn(4, reward=5.0),)
    assert credited(first, second, third, rewards=(0.0, 0.0, 0.0), kind="reward") == [
        (3.0, 3.0, 2.0),
        (1.0, 1.0, 1.0),
        (5.0,),
    ]
    assert credited(first, second, third, rewards=(0.0, 0.0, 0.0), kind="group_mean") == [
        (0.0, 0.0, 0.5),
        (-2.0, -0.5, -0.5),
        (2.0,),
    ]


def test_without_rewards_of_turns_that_of_the_trajectory_is_the_last_turn_s() -> None:
    # the third turn has nothing to compare with
    both = (turn(4), GIVEN, turn(2)), (turn(4), GIVEN, turn(2), GIVEN, turn(2))
    assert credited(*both, rewards=(1.0, 0.0), kind="group_mean") == [(0.5, 0.5), (-0.5, -0.5, 0.0)]


def test_turns_of_a_branch_are_counted_from_the_root_of_their_path() -> None:
    # returns: 1 + 2 for the shared turn on the first path; of the second turns 2, 4 and 6, their mean is 4
    branches = (turn(4, reward=1.0), GIVEN, turn(2, reward=2.0), Segment.of((3,), parent=0), turn(2, reward=4.0))
    other = (turn(4, reward=0.0), GIVEN, turn(2, reward=6.0))
    found = credited(branches, other, rewards=(0.0, 0.0), kind="group_mean")
    assert found == [(3.0 - 4.5, 2.0 - 4.0), (4.0 - 4.0,), (6.0 - 4.5, 6.0 - 4.0)]


def test_from_token_to_token_each_turn_s_reward_is_at_its_last_token() -> None:
    # gamma 0.5: 4 at the last token, 1 + 0.5 * 4 = 3 before it, 1.5 before that
    two = (turn(4, 4, reward=1.0), GIVEN, turn(2, reward=4.0))
    assert credited(two, rewards=(0.0,), kind="gae", gamma=0.5) == [(1.5, 3.0, 4.0)]


def test_a_kl_in_the_reward_is_that_of_the_turn_and_of_those_behind_it() -> None:
    # k1 = behavior - reference = 1, 0 | 2, weighted 0.5, 0 | 1: returns (1 + 2) - 1.5 and 2 - 1
    reference = ReferenceConfig(estimator="k1", weight=0.5, into="reward")
    config = AlgorithmConfig(advantages=ESTIMATORS("reward", credit="turn"), reference=reference)
    two = batch((turn(4, 4, reward=1.0), GIVEN, turn(2, reward=2.0)))
    (sample,) = samples_of(two, config, LONGEST, reference_logprobs={"g/0": [-3.0, -2.0, -3.0]}).samples
    assert tuple(sample.advantages) == (1.5, 1.5, 1.0)


def test_the_penalty_of_an_overlong_completion_is_that_of_its_longest_turn() -> None:
    # 7 of 8 tokens with a buffer of 2: half the penalty; both turns together would have it all
    shaping = Shaping(overlong_buffer=2, overlong_penalty=4.0)
    segments = (turn(*range(3)), GIVEN, turn(*range(7)))
    (sample,) = samples_of(
        batch(segments), AlgorithmConfig(advantages=ESTIMATORS("reward"), shaping=shaping), LONGEST
    ).samples
    assert set(sample.advantages) == {1.0 - 2.0}
    by_turn = AlgorithmConfig(advantages=ESTIMATORS("reward", credit="turn"), shaping=shaping)
    (sample,) = samples_of(batch(segments), by_turn, LONGEST).samples
    assert tuple(sample.advantages) == (-1.0,) * 10, "0 of the first turn, 1 - 2 of the last"


def test_a_single_turn_has_the_same_advantages_by_turn_and_by_trajectory() -> None:
    members, rewards = ((turn(4, 2),), (turn(3),), (turn(8, 8, 8),)), (1.0, 0.0, 0.5)
    kinds = ("group", "group_mean", "leave_one_out", "lite_ppo", "batch", "reinforce_pp", "gae", "reward")
    for kind in kinds:
        config = AlgorithmConfig.model_validate({"advantages": {"kind": kind}})
        plain = [tuple(one.advantages) for one in samples_of(batch(*members, rewards=rewards), config, LONGEST).samples]
        assert credited(*members, rewards=rewards, kind=kind) == plain


def test_values_advantages_and_returns_go_from_sampled_token_to_sampled_token() -> None:
    # values 0.5 before each; gamma = 1, lam = 0.5: delta = 0, 0, 0, 0.5, so A = 0.0625, 0.125, 0.25, 0.5 and R = A + V
    config = AlgorithmConfig(advantages=ESTIMATORS("gae", lam=0.5, critic=CriticConfig()))
    (sample,) = samples_of(batch((FIRST, TOOL, SECOND)), config, LONGEST, {"g/0": [0.5] * 4}).samples
    assert tuple(sample.advantages) == (0.0625, 0.125, 0.25, 0.5)
    assert tuple(sample.values) == (0.5, 0.5, 0.5, 0.5)
    assert tuple(sample.returns) == (0.5625, 0.625, 0.75, 1.0)


def test_a_kl_in_the_reward_is_that_of_the_sampled_tokens() -> None:
    # k1 = behavior - reference = 0.5, 0, -0.5, 1: their sum is 1, their mean 0.25, and the reward 1 - 0.1
    reference = ReferenceConfig(estimator="k1", weight=0.1, into="reward")
    config = AlgorithmConfig(advantages=ESTIMATORS("reward"), reference=reference)
    said = {"g/0": [-1.0, -1.0, -1.0, -3.0]}
    sampled = samples_of(batch((FIRST, TOOL, SECOND)), config, LONGEST, reference_logprobs=said)
    assert sampled.kl_reference == 0.25
    assert tuple(sampled.samples[0].advantages) == pytest.approx((0.9, 0.9, 0.9, 0.9))


def loss_of(model: PreTrainedModel, samples: list[Sample]) -> torch.Tensor:
    """The recipe's loss over these samples as one minibatch, anchored at half the distance to what sampled."""
    learner = Learner(model, OptimizerConfig())
    losses = []
    for micro in minibatch(samples, OptimizerConfig(), "token_mean", LONGEST, CPU).micro_batches:
        policy = learner.logprobs(micro.packed).logprobs
        anchor = (policy.detach() + micro.behavior_logprobs) / 2
        tokens = LossTokens(micro.behavior_logprobs, anchor, micro.advantages, micro.scale, micro.sequences)
        losses.append(evaluate(objective(AlgorithmConfig()), policy, tokens).value)
    return torch.stack(losses).sum()


def test_two_turns_have_the_loss_and_the_gradient_of_two_single_turns_with_the_same_context() -> None:
    """Of a mean over tokens, for a loss that looks at tokens."""
    config = AlgorithmConfig(advantages=ESTIMATORS("reward"))
    (both,) = samples_of(batch((FIRST, TOOL, SECOND), rewards=(0.5,)), config, LONGEST).samples
    (first,) = samples_of(batch((FIRST,), rewards=(0.5,)), config, LONGEST).samples
    history = replace(both, prompt_tokens=7, loss_positions=(7, 8), behavior_logprobs=SECOND.behavior_logprobs)
    second = replace(history, id="g/1", staleness=(1, 0), advantages=(0.5, 0.5))
    one, two = tiny(), tiny()
    together, apart = loss_of(one, [both]), loss_of(two, [first, second])
    assert_close(together, apart, FORWARD, size=LOGITS)
    together.backward()
    apart.backward()
    for ours, theirs in zip(one.parameters(), two.parameters(), strict=True):
        assert_close(ours.grad, theirs.grad, BACKWARD, size=LOGITS)
