"""Promise: a workflow that the model cannot follow is refused before a run, with its place, what is wrong and what
helps: without a chat template, with prompts that are no chats or are to be truncated, with words that the tokenizer
does not know."""

from pathlib import Path

import pytest

from stretto.core.errors import UserError, WorkflowError
from stretto.launch.preflight.plan import make_plan
from stretto.launch.recipe.recipe import validate
from stretto.model.hf.build import build_policy
from stretto.model.hf.tokenizer import Tokenizer, load_tokenizer
from stretto.rollout.workflow import WorkflowReady
from stretto_workflows.conversation import Conversation, Workflow
from stretto_workflows.loading import BUILT_IN, load_workflow, needs_of
from stretto_workflows.rendering import TemplateRendering
from stretto_workflows.run import check_workflow_fits
from stretto_workflows.task import WorkflowTask
from tests.gateway.serving import tokenizer_of
from tests.tiny_policy import TINY

CHATS = tokenizer_of("qwen2_5")
SETTINGS = {"environment": '{"make": "json:loads", "instructions": "Play to win."}'}


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Of a model that has no chat template and knows digits and signs alone."""
    folder = tmp_path_factory.mktemp("digits") / "model"
    build_policy(TINY, folder, seed=1)
    return load_tokenizer(folder)


def refused(name: str, needs: WorkflowReady, tokenizer: Tokenizer, plain: str | None = None) -> list[str]:
    try:
        check_workflow_fits(name, needs, tokenizer, plain)
    except WorkflowError as error:
        problems = error.problems
    else:
        return []
    assert all(problem.place == "workflow.function" and problem.remedy for problem in problems)
    return [problem.found for problem in problems]


@pytest.mark.parametrize("name", sorted(BUILT_IN))
def test_each_built_in_workflow_fits_models_that_chat_and_none_without_words(name: str, digits: Tokenizer) -> None:
    needs = needs_of(load_workflow(name, SETTINGS.get(name, "{}")))
    assert refused(name, needs, CHATS) == []
    found = refused(name, needs, digits)
    assert len(found) == bool(needs.needs_chat_template) + len(needs.words) > 0
    assert all(repr(name) in one for one in found)


def test_a_workflow_without_words_of_its_own_fits_a_model_of_digits(digits: Tokenizer) -> None:
    retry = needs_of(load_workflow("multi_turn", '{"feedback": "{prompt}"}'))
    assert refused("multi_turn", retry, digits, "rows.jsonl:1") == []


class Fixed(Workflow):
    """Has no settings."""

    def words(self) -> list[str]:
        return ["Again."]

    async def run(self, task: WorkflowTask, chat: Conversation) -> float:
        return 0.0


def test_only_a_workflow_that_has_settings_is_advised_to_give_others(digits: Tokenizer) -> None:
    for workflow, told in ((load_workflow("multi_turn"), "in [workflow.settings]"), (Fixed(), "let its class say")):
        with pytest.raises(WorkflowError) as caught:
            check_workflow_fits("name", needs_of(workflow), digits, None)
        remedies = [problem.remedy for problem in caught.value.problems]
        assert all(told in remedy and remedy.endswith(", or choose another model") for remedy in remedies), remedies


def test_tools_need_prompts_that_are_chats() -> None:
    [found] = refused("tools", needs_of(load_workflow("tools")), CHATS, "rows.jsonl:1")
    assert found.endswith("and the prompt at rows.jsonl:1 is plain text")


def test_a_first_turn_takes_the_tokens_of_a_prompt_as_they_are_unless_it_has_tools() -> None:
    cut, asked, tool = (17, 10), [{"role": "user", "content": "3+8="}], {"name": "add", "parameters": {}}
    rendering = TemplateRendering(CHATS)
    assert rendering.prompt(asked, 1, cut, ())[0] == cut
    assert len(rendering.prompt(asked, 1, cut, [tool])[0]) > len(cut)


class Wrong:
    """Says nothing that can be encoded."""

    needs_chat_template = ""

    def words(self) -> list[int]:
        return [7]


def test_a_class_of_the_users_own_that_says_it_wrong_is_refused() -> None:
    with pytest.raises(WorkflowError, match=r"'words' or 'needs_chat_template': ValidationError.*they are texts"):
        needs_of(Wrong())  # type: ignore[arg-type]  # that is what is tried


def test_a_plan_refuses_it(digits: Tokenizer, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "3+8=", "answer": "11"}\n' * 2)
    tree = {
        "model": {"path": str(digits.place)},
        "task": {"kind": "jsonl", "file": str(tmp_path / "rows.jsonl"), "held_out": 1},
        "trainer": {},
        "sampling": {"max_tokens": 16},
        "rollout": {"batch_size": 1},
        "workflow": {"function": "tools"},
    }
    with pytest.raises(UserError, match="'tools' tells the model its tools by the chat template") as caught:
        make_plan(validate(tree, "recipe.toml"))
    assert caught.value.exit_code == 2
    sources = [{"data": str(tmp_path / "rows.jsonl"), "held_out": 1}]
    tree["task"] = {"kind": "dataset", "sources": sources, "long_prompts": "truncate"}
    with pytest.raises(UserError, match="'truncate', and 'tools' tells the model its tools by") as caught:
        make_plan(validate(tree, "recipe.toml"))
    assert [problem.place for problem in caught.value.problems] == ["task.long_prompts"]
    tree["workflow"] = {"function": "user_simulator"}
    with pytest.raises(UserError, match=r"two sides, .* and the tokenizer in .* has none") as caught:
        make_plan(validate(tree, "recipe.toml"))
    assert "task.long_prompts" not in [problem.place for problem in caught.value.problems], "needs no whole prompt"
    tree["workflow"] = {"function": "tools"}
    with pytest.raises(UserError) as caught:  # a run that began so goes on
        make_plan(validate(tree, "recipe.toml"), has_policy=True)
    assert "task.long_prompts" not in [problem.place for problem in caught.value.problems]
