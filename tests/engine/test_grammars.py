"""Promises of a completion with a grammar: even a random model follows it, whatever interrupts it, and whichever engine
goes on with its tokens; its log-probabilities are those of the allowed tokens alone; other rows are as if there were no
grammar; a grammar of a stranger is refused, within bounds, and the engine goes on.
"""

import json
import math
import shutil
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from transformers import AutoModelForCausalLM, PreTrainedModel

from stretto.core.engine import MOST_GRAMMAR, json_grammar
from stretto.core.errors import RefusedRequest
from stretto.core.records import Completion, GenerateRequest, Sampling, Segment, StopReason
from stretto.engine.native.engine import NativeEngine
from stretto.engine.native.generation import FrameListener, Generation
from stretto.model.hf.grammar import Grammars
from stretto.model.hf.tokenizer import Tokenizer, load_tokenizer
from stretto.model.truncation import Truncation, truncate
from tests.engine.answering import engine_of, shaken, weights
from tests.engine.byte_policy import VOCABULARY, generated
from tests.engine.serving import served
from tests.tolerances import EXACT, LOGITS

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Paris", "Rom"]},
        "people": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "maxItems": 3},
        "old": {"type": "boolean"},
    },
    "required": ["city", "people", "old"],
    "additionalProperties": False,
}
EOS = 2


@pytest.fixture(scope="module")
def tokenizer(byte_folder: Path) -> Tokenizer:
    return load_tokenizer(byte_folder)


@pytest.fixture(scope="module")
def plain_bytes(byte_folder: Path) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(byte_folder, attn_implementation="eager")
    return model


def asked(grammar: str, seeds: Sequence[int] = (1, 2, 3), name: str = "a", **sampling: Any) -> GenerateRequest:
    settings = Sampling(**{"max_tokens": 90, "stop_token_ids": (EOS,), "grammar": grammar, **sampling})
    return GenerateRequest(name, (70, 71, 72), tuple(seeds), settings)


def follows(tokenizer: Tokenizer, completion: Completion) -> bool:
    said = json.loads(tokenizer.decode(completion.token_ids))
    return (
        completion.stop_reason is StopReason.STOP
        and list(said) == ["city", "people", "old"]
        and said["city"] in ("Paris", "Rom")
        and all(0 <= number <= 99 for number in said["people"])
        and said["old"] in (True, False)
    )


def test_the_shares_of_the_allowed_tokens_by_hand() -> None:
    logits = torch.tensor([[0.5, 0.3, 0.2]]).log()
    last_two = torch.tensor([[0b110]], dtype=torch.int32).numpy()
    alone = truncate(logits, Truncation.of(Sampling(max_tokens=1)), allowed_RW=last_two)
    assert alone.softmax(-1)[0].tolist() == pytest.approx([0, 0.6, 0.4])
    likeliest = truncate(logits, Truncation.of(Sampling(max_tokens=1, top_k=1)), allowed_RW=last_two)
    assert likeliest.softmax(-1)[0].tolist() == [0, 1, 0]  # the grammar comes first: the likeliest of what it leaves


@pytest.mark.parametrize("temperature", [1.0, 0.0, 5.0])
def test_a_random_model_follows_the_schema(byte_engine: NativeEngine, tokenizer: Tokenizer, temperature: float) -> None:
    told = generated(byte_engine, asked(json_grammar(SCHEMA), range(6), temperature=temperature))
    assert all(follows(tokenizer, completion) for completion in told)
    assert (len({completion.token_ids for completion in told}) > 1) is (temperature > 0)


def test_log_probabilities_are_of_what_the_grammar_leaves(
    byte_engine: NativeEngine, tokenizer: Tokenizer, plain_bytes: PreTrainedModel
) -> None:
    either = replace(asked('start: "a" ("b" | "c")', (3,), temperature=0.7), top_logprobs=3)
    [told] = generated(byte_engine, either)
    a, b, c = (tokenizer.vocabulary[letter] for letter in "abc")
    with torch.no_grad():
        logits = plain_bytes(torch.tensor([[70, 71, 72, a]])).logits[0, -1, [b, c]] / 0.7
    shares = dict(zip((b, c), logits.log_softmax(-1).tolist(), strict=True))
    assert told.token_ids in ((a, b, EOS), (a, c, EOS))
    assert told.behavior_logprobs == pytest.approx((0.0, shares[told.token_ids[1]], 0.0), abs=LOGITS)
    assert (told.behavior_logprobs[0], told.behavior_logprobs[2]) == (0, 0)  # forced: of probability 1, exactly
    assert [len(likeliest) for likeliest in told.top_logprobs] == [1, 2, 1]


def test_an_object_that_is_interrupted_or_goes_on_elsewhere_stays_whole(
    byte_folder: Path, byte_engine: NativeEngine, tokenizer: Tokenizer, plain_bytes: PreTrainedModel
) -> None:
    request = asked(json_grammar(SCHEMA), (4,))
    [whole] = generated(byte_engine, request)
    changed = weights(shaken(plain_bytes, 1))
    for step in (1, 13, len(whole.token_ids) - 1):  # in the opening, in the middle of a word, before the end
        engine = engine_of(byte_folder)
        engine.add(request)
        for _ in range(step):
            assert not engine.step()
        [partial] = engine.progress({"a": [0]})
        same = generated(byte_engine, replace(request, prefixes=(partial.segment,)))[0]  # if it was killed here
        assert same.token_ids == whole.token_ids
        assert same.behavior_logprobs == pytest.approx(whole.behavior_logprobs, abs=EXACT)
        engine.update(1, changed)
        [ended] = [completion for _ in range(90) for completion in engine.step()]
        assert follows(tokenizer, ended)
        assert ended.versions[: step + 1] == (0,) * step + (1,)


def test_other_rows_are_as_without_a_grammar(byte_engine: NativeEngine) -> None:
    free = asked("", (5, 6), "free", max_tokens=30, top_k=40)
    alone = generated(byte_engine, free)
    byte_engine.add(asked(json_grammar(SCHEMA)))
    beside = [one for one in generated(byte_engine, free) if one.request == "free"]
    assert [one.token_ids for one in beside] == [one.token_ids for one in alone]
    for one, other in zip(beside, alone, strict=True):
        assert one.behavior_logprobs == pytest.approx(other.behavior_logprobs, abs=EXACT)


def test_aborted_rows_leave_nothing_behind(byte_folder: Path, byte_engine: NativeEngine) -> None:
    engine = engine_of(byte_folder, slots=1)
    engine.add(asked(json_grammar(SCHEMA), (1,)))
    engine.step()
    engine.abort("a")
    [free] = generated(engine, asked("", (5,), "free", max_tokens=5))
    assert free.token_ids == generated(byte_engine, asked("", (5,), max_tokens=5))[0].token_ids


def nested(levels: int) -> dict[str, Any]:
    return {"type": "object", "properties": {"a": nested(levels - 1)}, "required": ["a"]} if levels else {}


HOSTILE = {
    "no grammar": "start: (",
    "no schema": json_grammar({"type": "nonsense"}),
    "deep": json_grammar(nested(200)),
    "not to be satisfied": json_grammar({"type": "integer", "minimum": 5, "maximum": 3}),
    "not known": json_grammar({"type": "array", "uniqueItems": True}),
    "nowhere": json_grammar({"$ref": "http://127.0.0.1:1/schema"}),
    "backtracking": r"start: /(a)\1/",
    "doubled 60 times": "start: R0\n" + "".join(f"R{at}: R{at + 1} R{at + 1}\n" for at in range(40)) + 'R40: "a"',
    "huge": json_grammar({"enum": [f"value {at}" for at in range(10_000)]}),
    "a long text": f'start: "{"a" * (MOST_GRAMMAR)}"',
    "circular": "start: A\nA: B\nB: A",
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_grammar_is_refused(byte_folder: Path, kind: str) -> None:
    grammars = Grammars(partial(load_tokenizer, byte_folder), VOCABULARY)
    with pytest.raises(RefusedRequest) as refused:
        grammars.check(HOSTILE[kind], (EOS,))
    assert refused.value.field == "sampling.grammar"


def test_rules_that_name_each_other_end_no_process(byte_engine: NativeEngine) -> None:
    chain = "\n".join(["start: a0", *(f"a{at}: a{at + 1}" for at in range(2500)), 'a2500: "a"'])
    assert MOST_GRAMMAR - 3000 < len(chain) < MOST_GRAMMAR
    [told] = generated(byte_engine, asked(chain, (1,)))
    assert len(told.token_ids) == 2


async def test_a_grammar_that_fails_on_the_way_ends_its_request_alone(byte_folder: Path) -> None:
    """The text of a special token is no text that the model could write, which shows where it is due."""
    generation = Generation(engine_of(byte_folder))
    ended = list[Completion]()

    class Kept(FrameListener):
        refusal: RefusedRequest | None = None

        def refuse(self, error: Any) -> None:
            self.refusal = error
            super().refuse(error)

        def ended(self, completion: Completion) -> None:
            ended.append(completion)
            super().ended(completion)

    broken, free = Kept(1), Kept(1)
    await generation.prepare([request := asked('start: "ab<s>"', (1,))])
    generation.submit(request, broken, every_token=False)
    generation.submit(asked("", (5,), "free", max_tokens=20), free, every_token=False)
    while not generation.engine.idle:
        for completion in generation._step():
            generation._listeners[completion.request].ended(completion)
    assert broken.refusal is not None
    assert broken.refusal.field == "sampling.grammar"
    assert [one.request for one in ended] == ["free"]
    generation.engine.check_integrity()


async def test_a_grammar_that_fails_on_the_way_leaves_nothing_sent_with_it(byte_folder: Path, tmp_path: Path) -> None:
    """Both requests of one call share a stream, which the refusal of the first one ends."""
    engine = engine_of(byte_folder)
    async with served(engine, tmp_path / "e.sock") as client:
        with pytest.raises(RefusedRequest, match=r"sampling\.grammar"):
            async for _ in client.generate(asked('start: "ab<s>"', (1,)), asked("", (5,), "beside")):
                pass
        assert [one.request async for one in client.generate(asked("", (5,), "next", max_tokens=99))] == ["next"]
        assert engine.health().unfinished == 0


def test_what_cannot_go_on_is_refused_by_its_field(byte_engine: NativeEngine) -> None:
    request = asked(json_grammar(SCHEMA), (1,))
    stranger = Segment.of((70, 71), (-0.1, -0.1), (0, 0))
    with pytest.raises(RefusedRequest, match="the grammar does not allow"):
        byte_engine.add(replace(request, prefixes=(stranger,)))
    with pytest.raises(RefusedRequest, match="ends of sequence"):
        byte_engine.add(asked(json_grammar(SCHEMA), stop_token_ids=()))
    assert byte_engine.idle


def test_a_grammar_ends_with_those_ends_of_sequence_that_are_asked_for(byte_folder: Path, tmp_path: Path) -> None:
    """The generation config names one, the tokenizer another."""
    folder = shutil.copytree(byte_folder, tmp_path / "model")
    (folder / "generation_config.json").write_text('{"eos_token_id": [0]}')
    for stops in ((0,), (EOS,), (0, EOS)):
        told = generated(engine_of(folder), asked('start: "ab"', range(6), stop_token_ids=stops))
        assert {one.token_ids[-1] for one in told} == set(stops)
        assert {one.stop_reason for one in told} == {StopReason.STOP}


def test_an_engine_that_cannot_says_why(engine: NativeEngine) -> None:
    """The tokenizer of these tests' numbers is none of bytes."""
    with pytest.raises(RefusedRequest, match="llguidance cannot use the tokenizer"):
        engine.add(GenerateRequest("a", (5,), (1,), Sampling(4, stop_token_ids=(1,), grammar='start: "1"')))


def test_without_the_package_the_remedy_is_told(byte_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stretto.model.hf.grammar._INSTALLED", False)
    with pytest.raises(RefusedRequest, match=r"pip install 'stretto\[grammars\]'"):
        engine_of(byte_folder).add(asked(json_grammar(None)))


def test_forced_tokens_are_certain(byte_engine: NativeEngine) -> None:
    [told] = generated(byte_engine, asked('start: "the same words each time"', (9,)))
    assert set(told.behavior_logprobs) == {0.0}
    assert math.exp(sum(told.behavior_logprobs)) == 1
