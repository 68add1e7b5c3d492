"""The built-in workflows, and the examples, with a real tokenizer and a model that says what it is told to: their
conversations are what the chat template renders, what was said stays as it was sampled, and their rewards are those of
their pages."""

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from stretto.core.forest import TurnRequest, way_to
from stretto.core.records import PROMPT, Prompt, Sampling, Segment, StopReason, Trajectory
from stretto.rollout.workflow import QuestionDetails, WorkflowConfig
from stretto.trainer.batch.paths import paths_of
from stretto_verify.sandbox.probe import probe
from stretto_workflows.built_in import tools
from stretto_workflows.built_in.best_of_n import BestOfN
from stretto_workflows.built_in.self_play import SelfPlay
from stretto_workflows.built_in.tools import PythonTool, Search, calculate
from stretto_workflows.built_in.user_simulator import UserSimulator
from stretto_workflows.built_in.wording import filled
from stretto_workflows.exchange import Services
from stretto_workflows.pool import WorkflowGroups, WorkflowPool
from stretto_workflows.rendering import PlainRendering, TemplateRendering
from stretto_workflows.session import MemoryRecord, Session
from stretto_workflows.task import TurnReply, WorkflowTask
from tests.gateway.serving import ENDS, tokenizer_of
from tests.launch.warm import session_server
from tests.workflows.benches import score, verdict

EXAMPLES = Path(__file__).parents[2] / "examples" / "workflows"
TOKENIZER = tokenizer_of("qwen3")
MESSAGES = ({"role": "user", "content": "3+4="},)

#: What the model says behind the text of a prompt.
Script = Callable[[str], str]


def spelt(text: str, *, end: bool = True) -> tuple[int, ...]:
    """A text letter by letter, which no tokenizer would write."""
    letters = [TOKENIZER.encode(letter, special_tokens=False) for letter in text]
    return sum(letters, start=()) + (TOKENIZER.encode(ENDS["qwen3"], special_tokens=False) if end else ())


def played(
    config: WorkflowConfig,
    script: Script,
    tmp_path: Path,
    *,
    chat: bool = True,
    known: Sequence[Segment] = (),
    earlier: int = 0,
    **arguments: object,
) -> tuple[Trajectory, list[tuple[int, ...]]]:
    """One trajectory, and the prompts of its turns. `known`: segments on record, `earlier` of them
    of an earlier version. `arguments`: of the template."""
    asked: list[tuple[int, ...]] = []
    record = MemoryRecord()

    async def sample(request: TurnRequest) -> Segment:
        asked.append(request.prompt)
        said = spelt(script(TOKENIZER.spell(request.prompt)))
        whole = Segment.of(said, (-0.5,) * len(said), (0,) * len(said), stop_reason=StopReason.STOP)
        record.journal(request.node, whole)
        return whole

    async def run() -> Trajectory:
        plain = PlainRendering(lambda text: TOKENIZER.encode(text, special_tokens=False))
        services = Services(
            score, TOKENIZER.decode, plain, TemplateRendering(TOKENIZER), Sampling(64), 4096, verdict, config
        )
        key = ("17", "3+4=", "7")
        tokens = TOKENIZER.encode_chat(MESSAGES, **arguments) if chat else spelt("3+4=", end=False)
        details = QuestionDetails({}, {key: MESSAGES} if chat else {}, {key: arguments})

        def opened(id: str, prompt: tuple[int, ...], seed: int) -> Session:
            return Session(id, prompt, seed, sample, record, known, earlier=earlier)

        async with WorkflowPool(config, tmp_path / "log.txt", spawner=session_server()) as pool:
            groups = WorkflowGroups(pool, opened, details, services)
            return await groups.member("0.17.0/0", Prompt("17", tokens, "3+4=", "7"), 0, 1, group_seed=0)

    return asyncio.run(run()), asked


def spelling(trajectory: Trajectory, place: int) -> str:
    """All that stands before the end of a segment, behind the prompt."""
    _, places = way_to(trajectory.segments, place)
    return "".join(TOKENIZER.spell(trajectory.segments[at].token_ids) for at in places)


def test_the_model_tries_again_behind_exactly_what_it_said(tmp_path: Path) -> None:
    config = WorkflowConfig(function="multi_turn", settings={"tries": 3, "feedback": "No: {prompt}"})
    trajectory, asked = played(config, lambda text: "7" if "No: " in text else "12", tmp_path)
    assert trajectory.verdict.reward == pytest.approx(0.9)
    assert [one.reward for one in trajectory.segments] == [0.0, None, pytest.approx(0.9)]
    assert trajectory.verdict.rewards == {"tries": 2.0, "first": 0.0}
    assert asked[1] == asked[0] + trajectory.segments[0].token_ids + trajectory.segments[1].token_ids
    lost, _ = played(config, lambda text: "12", tmp_path)
    assert [one.reward for one in lost.segments if one.sampled] == [0.0, 0.0, 0.0]
    told = "\n<|im_start|>user\nNo: 3+4=<|im_end|>\n<|im_start|>assistant\n"
    assert TOKENIZER.spell(trajectory.segments[1].token_ids).startswith(told)


def test_tools_are_called_as_the_template_has_them(tmp_path: Path) -> None:
    def script(text: str) -> str:
        if "<tool_response>" in text:
            return text.rpartition("<tool_response>\n")[2].partition("\n")[0]
        return '<tool_call>\n{"name": "calculator", "arguments": {"expression": "3+4"}}\n</tool_call>'

    trajectory, asked = played(WorkflowConfig(function="tools", settings={"tools": ["calculator"]}), script, tmp_path)
    assert (trajectory.verdict.reward, trajectory.verdict.rewards) == (1.0, {"calls": 1.0})
    assert "<tool_response>\n7\n</tool_response>" in spelling(trajectory, len(trajectory.segments) - 1)
    assert [TOKENIZER.spell(prompt).count("Evaluates an arithmetic expression.") for prompt in asked] == [1, 1]
    [path] = paths_of(Prompt("17", TOKENIZER.encode_chat(MESSAGES), "3+4=", "7"), trajectory)
    begins = [at for at in path.places.tolist() if at - 1 not in path.places]
    assert [tuple(path.token_ids[:at].tolist()) for at in begins] == asked  # trained behind what it was sampled behind


def recorded(text: str, **of: Any) -> Segment:
    said = spelt(text)
    return Segment.of(said, (-0.5,) * len(said), (0,) * len(said), stop_reason=StopReason.STOP, **of)


def test_turns_that_an_earlier_version_sampled_behind_prompts_without_their_tools_are_not_sampled_again(
    tmp_path: Path,
) -> None:
    call = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "3+4"}}\n</tool_call>'
    known, config = recorded(call, parent=PROMPT), WorkflowConfig(function="tools", settings={"tools": ["calculator"]})
    trajectory, [asked] = played(config, lambda text: "7", tmp_path, known=[known], earlier=1)
    before = TOKENIZER.encode_chat(MESSAGES) + known.token_ids
    assert (asked[: len(before)], trajectory.verdict.rewards) == (before, {"calls": 1.0})
    _, anew = played(config, lambda text: "7", tmp_path, known=[known])
    assert "Evaluates an arithmetic expression." in TOKENIZER.spell(anew[0])  # a turn of this version has no tools


def test_turns_that_an_earlier_version_sampled_without_the_template_arguments_are_not_sampled_again(
    tmp_path: Path,
) -> None:
    config = WorkflowConfig(function="multi_turn", settings={"tries": 3, "feedback": "No: {prompt}"})
    told = "\n<|im_start|>user\nNo: 3+4=<|im_end|>\n<|im_start|>assistant\n"
    tail = Segment.of(TOKENIZER.encode(told, special_tokens=False))
    known = [recorded("12", parent=PROMPT), tail, recorded("13")]
    trajectory, [asked] = played(config, lambda text: "7", tmp_path, known=known, earlier=3, enable_thinking=False)
    assert TOKENIZER.spell(asked).endswith(f"13<|im_end|>{told}<think>\n\n</think>\n\n")
    assert [TOKENIZER.decode(one.token_ids) for one in trajectory.segments if one.sampled] == ["12", "13", "7"]


def test_every_turn_has_the_tools_that_it_offers_and_the_template_arguments_of_its_question(tmp_path: Path) -> None:
    config = WorkflowConfig(function="tests.workflows.users_own:Offers")
    trajectory, asked = played(config, lambda text: "7", tmp_path, enable_thinking=False)
    spelt = [TOKENIZER.spell(prompt) for prompt in asked]
    assert [text.count("Adds two numbers.") for text in spelt] == [0, 1, 1, 1, 0]
    assert all(text.endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n") for text in spelt)
    for before, behind in ((1, 2), (2, 3)):  # what was said is not encoded again
        assert asked[behind][: len(asked[before])] == asked[before]
    assert [one.cause for one in trajectory.segments if one.cause] == ["tools_changed", "subagent"]


def test_a_user_whom_the_model_plays_talks_in_a_conversation_of_its_own(tmp_path: Path) -> None:
    def script(text: str) -> str:
        return (
            ("DONE" if "7" in text else "What is 3+4?") if "You are a user" in text else "7" if "What" in text else "?"
        )

    config = WorkflowConfig(function="user_simulator", settings={"turns": 3, "user_reward": 0.25})
    trajectory, _ = played(config, script, tmp_path)
    assert trajectory.verdict.reward == 1.0
    sampled = [one for one in trajectory.segments if one.sampled]
    assert [TOKENIZER.decode(one.token_ids) for one in sampled] == ["?", "What is 3+4?", "7", "DONE"]
    assert [one.reward for one in sampled] == [0.0, 0.25, 1.0, 0.25]
    assert [one.cause for one in trajectory.segments if one.cause] == ["user"]


def test_a_critic_gets_what_its_criticism_gained(tmp_path: Path) -> None:
    def script(text: str) -> str:
        return "it is 7" if "Mistake:" in text else "7" if "A critic says: it is 7" in text else "12"

    trajectory, _ = played(WorkflowConfig(function="self_play"), script, tmp_path)
    assert [one.reward for one in trajectory.segments if one.sampled] == [1.0, 1.0, 1.0]
    assert trajectory.verdict.rewards == {"first": 0.0, "last": 1.0}


def test_the_judge_s_choice_is_the_reward(tmp_path: Path) -> None:
    said = iter(["12", "7"])

    def script(text: str) -> str:
        if "Say its number" in text:
            return next(line for line in text.splitlines() if line.endswith(": 7"))[0]
        return next(said)

    trajectory, asked = played(WorkflowConfig(function="best_of_n", settings={"n": 2}), script, tmp_path)
    assert trajectory.verdict.reward == 1.0
    assert asked[0] == asked[1]
    assert sorted(one.reward or 0.0 for one in trajectory.segments if one.sampled) == [0.0, 1.0, 1.0]


def test_the_arguments_of_a_call_may_be_an_object_or_its_text() -> None:
    def spelt_with(arguments: object) -> str:
        call = {"id": None, "type": "function", "function": {"name": "add", "arguments": arguments}}
        messages: list[Mapping[str, Any]] = [*MESSAGES, {"role": "assistant", "content": "", "tool_calls": [call]}]
        return TOKENIZER.spell(TemplateRendering(TOKENIZER).prompt(messages, 0, (), ())[0])

    assert '"arguments": {"a": true, "b": "é"}' in spelt_with({"a": True, "b": "é"})
    assert spelt_with({"a": True, "b": "é"}) == spelt_with('{"a": true, "b": "é"}')


@pytest.mark.parametrize("number", ["0000012", "3", "0", "9" * 5000])
def test_a_judge_that_names_no_answer_chooses_the_first(number: str, tmp_path: Path) -> None:
    said = iter(["7", "12"])
    config = WorkflowConfig(function="best_of_n", settings={"n": 2, "judge": "Which?{answers}"})
    trajectory, _ = played(config, lambda text: number if "Which?" in text else next(said), tmp_path)
    assert (trajectory.verdict.reward, trajectory.verdict.reason) == (1.0, "")


def test_a_question_that_holds_a_name_in_braces_stays_as_it_is() -> None:
    assert filled("{prompt}|{answer}|{done}", prompt="{answer}", answer="{prompt}") == "{answer}|{prompt}|{done}"


async def test_the_critic_and_the_judge_get_the_question_as_it_is() -> None:
    asked: list[str] = []

    class Chat:
        def __init__(self, messages: Any = ()) -> None:
            asked.extend(message["content"] for message in messages)

        def new(self, messages: Any, cause: str) -> "Chat":
            return Chat(messages)

        def copy(self) -> "Chat":
            return self

        def say(self, text: str) -> None:
            """It is not asked again."""

        async def generate(self) -> TurnReply:
            return TurnReply(0, "said", {}, (), False)

        async def score(self, text: str) -> float:
            return 1.0

    task = WorkflowTask("17", "Write {answer}, {answers} or {done}.", "7")
    for workflow in (SelfPlay(), BestOfN(), UserSimulator(turns=2)):
        await workflow.run(task, Chat())  # type: ignore[arg-type]  # a conversation by its methods
    assert [text.count(task.prompt) for text in asked] == [1, 1, 1]


def test_the_calculator_takes_arithmetic_and_nothing_else() -> None:
    assert [calculate(text) for text in ("(3+4)*5", "7/2", "-2**3", "10 % 4")] == ["35", "3.5", "-8", "2"]
    for text in ("9**9**9", "__import__('os')", "1e400", "()", "1+", "(-1)**0.5", "1" * 600, "True", "1e10**64"):
        with pytest.raises(ValueError, match=r"."):
            calculate(text)


def test_a_search_finds_the_passage_with_the_rarest_words(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("the capital of France is Paris\n\nthe river of France is the Seine")
    (tmp_path / "b.md").write_text("the capital of Peru is Lima")
    (tmp_path / "c.bin").write_bytes(b"\xff capital")
    search = Search(tmp_path, results=1)
    assert search("capital of Peru") == "b.md: the capital of Peru is Lima"
    assert search("zebra") == "nothing was found"


def test_a_program_runs_in_the_sandbox_and_its_end_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tools, "probe", partial(probe, attacks=[]))  # seconds, and `tests/verify/sandbox` has them
    python = PythonTool(seconds=2.0)
    assert python("print(3+4)") == "7\n"
    assert "ZeroDivisionError" in python("1/0")


@pytest.mark.parametrize(
    ("example", "says", "reward"),
    [
        ("retry:Retry", {"=": "12", "?3+4=": "7"}, 1.0),
        ("own_tool:Asking", {"=": "?3+4", "=7;": "7"}, 1.0),
        ("debate:Debate", {"=": "7"}, 1.0),
    ],
)
def test_the_examples_do_what_they_say(example: str, says: dict[str, str], reward: float, tmp_path: Path) -> None:
    def script(text: str) -> str:
        text = text.replace("<|im_end|>", "")
        return next(said for behind, said in reversed(says.items()) if text.endswith(behind))

    trajectory, _ = played(WorkflowConfig(function=example, path=str(EXAMPLES)), script, tmp_path, chat=False)
    assert trajectory.verdict.reward == reward, trajectory.verdict.reason or json.dumps(trajectory.text)
