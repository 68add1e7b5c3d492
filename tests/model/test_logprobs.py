"""Promises: log-probabilities are those of the plain transformers module, at any temperature, behind any filters and
in any chunking; positions that are not wanted cost no logits, but for a filler to a length that repeats.
"""

import pytest
import torch
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from stretto.core.records import Sampling
from stretto.model.packed.attention import PACKED_ATTENTION
from stretto.model.packed.logprobs import pack_tokens, token_logprobs
from tests.model.test_truncation import plain
from tests.tiny_policy import sized
from tests.tolerances import LOGITS, assert_close, operations

SHAPE = sized(17, width=16, inner=24, layers=2, heads=(2, 1), max_position_embeddings=64, initializer_range=0.3)
FORWARD, BACKWARD = (operations(SHAPE["intermediate_size"], 2, backward=back) for back in (False, True))
SEQUENCES = [(5, 12, 4, 2), (5, 2), (1, 2, 3, 4, 5, 6, 7)]


def build(attention: str = PACKED_ATTENTION) -> PreTrainedModel:
    torch.manual_seed(3)
    config = Qwen3Config(**SHAPE, head_dim=8)
    model: PreTrainedModel = Qwen3ForCausalLM._from_config(config, attn_implementation=attention)
    model.eval()
    return model


def drawn(temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> Sampling:
    return Sampling(max_tokens=1, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)


FILTERS = [
    *(drawn(), drawn(0.5), drawn(0.7, top_p=0.9), drawn(top_k=3), drawn(top_k=1), drawn(min_p=0.4)),
    drawn(1.3, top_k=9, top_p=0.8, min_p=0.1),
]


def test_the_output_matrix_sees_few_lengths_however_many_tokens_are_wanted() -> None:
    model, rows = build(), set[int]()
    model.get_output_embeddings().register_forward_hook(lambda module, inputs, logits: rows.add(len(logits)))
    for wanted in (129, 131, 135, 136, 137, 143):
        sequence = [at % 17 for at in range(wanted + 1)]
        assert len(token_logprobs(model, pack_tokens([sequence]), drawn()).logprobs) == wanted
    assert rows == {136, 144}


def test_a_row_that_is_filled_up_has_the_values_and_the_gradients_of_its_sequences_alone() -> None:
    sequences = [[(7 * at + 3 * s) % 17 for at in range(20 + s)] for s in range(7)]  # 161 tokens, and 7 to fill up
    packed = pack_tokens(sequences)
    assert packed.input_ids.shape[1] == 168
    together, alone = build(), build("eager")
    found = token_logprobs(together, packed, drawn()).logprobs
    rows = [alone(torch.tensor([tokens])).logits[0, :-1].log_softmax(-1) for tokens in sequences]
    chosen = [row.gather(1, torch.tensor(ids[1:])[:, None])[:, 0] for row, ids in zip(rows, sequences, strict=True)]
    expected = torch.cat(chosen)
    assert_close(found, expected, FORWARD)
    found.mean().backward()
    expected.mean().backward()
    for ours, theirs in zip(together.parameters(), alone.parameters(), strict=True):
        assert_close(ours.grad, theirs.grad, BACKWARD)


def test_a_filler_is_one_sequence_whose_positions_pass_no_other_and_change_no_bit() -> None:
    """Learned positions may end there; the buckets of attention are those of runs that are replayed."""
    packed, model = pack_tokens([(1, 2, 3)] * 700), build()
    filled = pack_tokens([*[(1, 2, 3)] * 700, [0] * 76], [*[(1, 2)] * 700, ()])
    assert packed.packing.lengths == filled.packing.lengths
    assert packed.packing.buckets == filled.packing.buckets == ((1, 76), (700, 3))
    assert int(packed.packing.position_ids.max()) == 2
    assert torch.equal(*(token_logprobs(model, one, drawn()).logprobs for one in (packed, filled)))


@pytest.mark.parametrize("targets", [None, []])
def test_without_sequences_a_row_can_be_computed_and_nothing_is_scored(targets: list[tuple[int, ...]] | None) -> None:
    assert token_logprobs(build(), pack_tokens([], [], targets=targets), drawn(), entropy=True).logprobs.shape == (0,)


def filtered_reference(model: PreTrainedModel, sampling: Sampling) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probability and entropy under the tokens that are left and the token itself, token by token, by autograd."""
    chosen, entropies = [], []
    for sequence in SEQUENCES:
        for logits, token in zip(model(torch.tensor([sequence])).logits[0], sequence[1:], strict=False):
            scaled = logits / sampling.temperature
            filters = (sampling.top_k, sampling.top_p, sampling.min_p)
            kept = sorted({*plain(scaled.detach().numpy(), *filters), token})
            logprobs = scaled[kept].log_softmax(-1)
            chosen.append(logprobs[kept.index(token)])
            entropies.append(-(logprobs.exp() * logprobs).sum())
    return torch.stack(chosen), torch.stack(entropies)


@pytest.mark.parametrize("sampling", FILTERS)
@pytest.mark.parametrize("chunk_logits", [1 << 24, 3 * 17])
def test_values_and_gradients_are_those_of_the_plain_definition(sampling: Sampling, chunk_logits: int) -> None:
    ours, theirs = build(), build("eager")
    got = token_logprobs(ours, pack_tokens(SEQUENCES), sampling, entropy=True, chunk_logits=chunk_logits)
    logprobs, entropy = filtered_reference(theirs, sampling)
    assert got.entropy is not None
    assert_close(got.logprobs, logprobs, FORWARD, size=LOGITS)
    assert_close(got.entropy, entropy, FORWARD, size=LOGITS)
    (got.logprobs.square().sum() + got.entropy.sum()).backward()
    (logprobs.square().sum() + entropy.sum()).backward()
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert other.grad is not None
        assert_close(mine.grad, other.grad, BACKWARD, size=max(LOGITS, float(other.grad.abs().max())))


def test_only_wanted_positions_are_answered_and_in_their_order() -> None:
    packed = pack_tokens(SEQUENCES, wanted=[[2, 3], [], [1, 6]])
    assert packed.wanted.tolist() == [2, 3, 7, 12]
    ours = token_logprobs(build(), packed, drawn()).logprobs
    assert_close(ours, filtered_reference(build("eager"), drawn())[0][[1, 2, 4, 9]], FORWARD)


def test_a_target_may_follow_the_last_token() -> None:
    wanted, targets = [[1, len(one) - 1] for one in SEQUENCES], [[3, one[-1]] for one in SEQUENCES]
    packed = [pack_tokens([one[:end] for one in SEQUENCES], wanted, targets=targets) for end in (None, -1)]
    assert [one.input_ids.shape[1] for one in packed] == [13, 10]
    longer, shorter = (token_logprobs(build(), one, drawn()).logprobs for one in packed)
    assert_close(longer, shorter, FORWARD)
    with pytest.raises(ValueError, match="wanted positions"):
        pack_tokens([one[:-1] for one in SEQUENCES], wanted)


ANSWERS = [(5, 12, 7, 4, 2), (3, 1), (5, 12, 7, 9), (3, 2, 2, 2), (5, 12, 7, 1, 1, 8)]
PROMPTS = [3, 1, 3, 1, 3]


@pytest.mark.parametrize(
    "wanted", [[range(p, len(s)) for s, p in zip(ANSWERS, PROMPTS, strict=True)], [[4], [], [3], [2], []]]
)
def test_a_shared_prompt_is_computed_once_and_changes_nothing(wanted: list[range]) -> None:
    apart, shared = build(), build()
    one, two = pack_tokens(ANSWERS, wanted), pack_tokens(ANSWERS, wanted, prompts=PROMPTS)
    assert (one.packing.tokens, two.packing.tokens) == (21, 21 - 2 * 3 - 1)
    assert one.input_ids[0, one.wanted].tolist() == two.input_ids[0, two.wanted].tolist()
    theirs, ours = token_logprobs(apart, one, drawn()).logprobs, token_logprobs(shared, two, drawn()).logprobs
    assert_close(ours, theirs, FORWARD)
    theirs.square().sum().backward()
    ours.square().sum().backward()
    for (name, mine), other in zip(shared.named_parameters(), apart.parameters(), strict=True):
        assert mine.grad is not None, name
        assert other.grad is not None, name
        assert_close(mine.grad, other.grad, BACKWARD)


def test_nothing_within_a_shared_prompt_can_be_wanted() -> None:
    with pytest.raises(ValueError, match="wanted positions"):
        pack_tokens(ANSWERS, [[], [], [2], [], []], prompts=PROMPTS)


@pytest.mark.parametrize("sampling", FILTERS)
def test_without_the_entropy_and_in_chunks_values_and_gradients_are_the_same(sampling: Sampling) -> None:
    whole, chunked = build(), build()
    packed = pack_tokens(SEQUENCES)
    one = token_logprobs(whole, packed, sampling, entropy=True)
    many = token_logprobs(chunked, packed, sampling, chunk_logits=3 * 17)
    assert_close(one.logprobs, many.logprobs, FORWARD)
    assert many.entropy is None
    one.logprobs.square().sum().backward()
    many.logprobs.square().sum().backward()
    for ours, theirs in zip(whole.parameters(), chunked.parameters(), strict=True):
        assert_close(ours.grad, theirs.grad, BACKWARD)


def kept_logits(chunk_logits: int) -> int:
    """The most logits that the graph of a forward over 60 wanted tokens keeps in one tensor."""
    model, kept = build(), list[int]()

    def keep(saved: torch.Tensor) -> torch.Tensor:
        kept.append(saved.numel() if saved.dim() == 2 and saved.shape[1] == 17 else 0)
        return saved

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda saved: saved):
        token_logprobs(model, pack_tokens([tuple(range(16))] * 4), drawn(), chunk_logits=chunk_logits)
    return max(kept)


def test_no_more_than_one_chunk_of_logits_is_kept_for_the_backward_pass() -> None:
    assert kept_logits(chunk_logits=60 * 17) == 60 * 17
    assert kept_logits(chunk_logits=5 * 17) <= 5 * 17


@pytest.mark.parametrize("wanted", [[[0], [], []], [[4], [], []]])
def test_a_wanted_position_has_a_token_before_it_and_is_inside(wanted: list[list[int]]) -> None:
    with pytest.raises(ValueError, match="wanted positions"):
        pack_tokens(SEQUENCES, wanted)
