"""Promise: agents of five makes, unchanged, call tools through the gateway; each continues one conversation or begins
branches for a known cause, and every token that was sampled for it re-scores to 1e-4 in its training sample."""

from pathlib import Path
from typing import Any

import pytest

from tests.gateway.serving import ScriptedModel, one_session, served_gateway, tokenizer_of
from tests.real_agents.running import ScoredModel, check_scores, run

ADD = '<tool_call>\n{"name": "%s", "arguments": {"a": 1,  "b": 2}}\n</tool_call>'
FINAL = '<tool_call>\n{"name": "final_answer", "arguments": {"answer": "3"}}\n</tool_call>'

#: What they ask for in each of their two turns that no turn is made to follow.
WISHES = {"openai_agents": {"strict": 2}, "pydantic_agent": {"strict": 2}, "smolagents_agent": {"tool_choice": 2}}


def script(prompt: str) -> str:
    """Two parallel calls with a space too many, which no JSON library writes; then the answer."""
    if prompt.count("<|im_start|>assistant") == 1:
        tool = "mcp__sums__add" if "mcp__sums__add" in prompt else "add"
        return "\n".join([ADD % tool] * 2)
    return FINAL if "final_answer" in prompt else "It is 3."


def thinking(prompt: str) -> str:
    return f"<think>\nsmall numbers\n</think>\n\n{script(prompt)}"


@pytest.mark.parametrize(
    ("program", "words", "branches", "as_json"),
    [
        *[("openai_agents", ["chat"], {}, 0), ("openai_agents", ["chat", "stream"], {}, 0)],
        *[("openai_agents", ["responses"], {}, 0), ("openai_agents", ["responses", "stream"], {}, 0)],
        *[("openai_agents", ["responses", "ids"], {}, 0), ("pydantic_agent", ["whole"], {}, 1)],
        *[("pydantic_agent", ["stream"], {}, 1), ("langgraph_agent", ["whole"], {}, 1)],
        *[("langgraph_agent", ["stream"], {}, 1), ("smolagents_agent", [], {"history_rewritten": 1}, 0)],
        ("claude_agent", ["plain"], {}, 1),
    ],
)
async def test_an_agent_calls_tools(
    agents: Path, tmp_path: Path, program: str, words: list[str], branches: dict[str, int], as_json: int
) -> None:
    model = ScoredModel(script)
    async with one_session(model, tmp_path) as (gateway, session):
        answer = await run(agents, program, *words, session=session, home=tmp_path)
        shown: dict[str, Any] = await gateway.shown(session)
        assert answer.removeprefix("It is ").removesuffix(".") == "3"
        assert (shown["branches"], shown["equal_as_json"], shown["retries"]) == (branches, as_json, 0)
        assert shown["unapplied"] == WISHES.get(program, {})
        assert sum(node["sampled"] for node in shown["nodes"]) == 2
        assert len(shown["samples"]) == 1 + len(branches)
        await check_scores(gateway, session, model.vocabulary)


@pytest.mark.parametrize(
    ("program", "words", "branches"),
    [
        *[("openai_agents", ["chat"], {"reasoning_stripped": 1}), ("openai_agents", ["responses"], {})],
        *[("openai_agents", ["responses", "ids"], {}), ("openai_agents", ["responses", "stream"], {})],
        *[("pydantic_agent", ["whole"], {}), ("langgraph_agent", ["whole"], {"reasoning_stripped": 1})],
        *[("smolagents_agent", [], {"history_rewritten": 1}), ("claude_agent", ["plain"], {})],
    ],
)
async def test_an_agent_gives_the_reasoning_back_or_begins_a_branch(
    agents: Path, tmp_path: Path, program: str, words: list[str], branches: dict[str, int]
) -> None:
    model = ScoredModel(thinking, tokenizer_of("qwen3"))
    async with one_session(model, tmp_path) as (gateway, session):
        answer = await run(agents, program, *words, session=session, home=tmp_path)
        assert answer.removeprefix("It is ").removesuffix(".") == "3"
        assert (await gateway.shown(session))["branches"] == branches
        await check_scores(gateway, session, model.vocabulary)


async def test_an_agent_that_is_started_again_is_answered_from_the_record(agents: Path, tmp_path: Path) -> None:
    async with one_session(ScoredModel(script), tmp_path) as (gateway, session):
        first = await run(agents, "openai_agents", "chat", session=session, home=tmp_path)
        recorded = await gateway.shown(session)
    silent = ScoredModel(lambda prompt: pytest.fail("it has been sampled before"))
    async with served_gateway(silent, tmp_path) as gateway:
        moved = {**session, "base_url": f"{gateway.address}/s/{session['api_key']}/v1"}
        assert await run(agents, "openai_agents", "chat", session=moved, home=tmp_path) == first
        assert (await gateway.shown(session))["nodes"] == recorded["nodes"]
        assert silent.asked == []


async def test_an_agent_of_an_ended_session_is_refused_at_once(agents: Path, tmp_path: Path) -> None:
    async with one_session(ScoredModel(script), tmp_path) as (gateway, session):
        await gateway.client.post(f"/sessions/{session['id']}/end")
        for program, word in (("openai_agents", "chat"), ("claude_agent", "plain")):
            with pytest.raises(AssertionError, match="ended"):
                await run(agents, program, word, session=session, home=tmp_path)
        assert (await gateway.shown(session))["stragglers"] == 2  # neither tries again


async def test_claude_code_with_all_its_tools_finds_one_of_the_users(agents: Path, tmp_path: Path) -> None:
    """It names the users' tools, and tells their schemas when the model has searched for them."""
    asked = list[str]()

    def searching(prompt: str) -> str:
        asked.append(prompt)
        if len(asked) == 1:
            query = '{"query": "select:mcp__sums__add"}'
            return f'<tool_call>\n{{"name": "ToolSearch", "arguments": {query}}}\n</tool_call>'
        return ADD % "mcp__sums__add" if len(asked) == 2 else "It is 3."

    async with one_session(ScriptedModel(searching), tmp_path) as (gateway, session):
        answer = await run(agents, "claude_agent", "everything", session=session, home=tmp_path)
        shown = await gateway.shown(session)
        assert (answer, shown["branches"]) == ("It is 3.", {"tools_changed": 1})
        assert len(shown["samples"]) == 2
        assert "mcp__sums__add" in asked[1].rpartition("<tool_response>")[2]
