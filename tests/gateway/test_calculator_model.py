"""Promise: what the calculator's model is shown (`examples/agents/calculator_model.py`) is, token by token, what the
gateway asks it with when a client of openai-agents uses the tool."""

import json

import pytest

from examples.agents.calculator_model import conversations, rendered, tokenizer
from stretto.model.hf.tokenizer import Tokenizer
from stretto_workflows.chat.bridge import Bridge, CompletedTurn, Renderer
from stretto_workflows.chat.messages import Message, Tool, ToolCall
from stretto_workflows.chat.tool_calls import form_of

TOOLS = (Tool("calculator", "Multiply, such as 12*37.", {"type": "object"}),)


@pytest.fixture(scope="module")
def words() -> Tokenizer:
    whole = tokenizer([rendered(one) for one in conversations(512, seed=1)])
    return Tokenizer("calculator", (whole.eos_token_id,), whole, whole.backend_tokenizer)


def test_the_gateway_asks_with_the_tokens_that_were_shown(words: Tokenizer) -> None:
    shown = next(conversations(4, seed=1))  # the first one uses the tool
    assert [message["role"] for message in shown] == ["system", "user", "assistant", "tool", "assistant"]
    history = (Message("system", shown[0]["content"]), Message("user", shown[1]["content"]))
    bridge = Bridge(Renderer(words))
    first = bridge.next(history, TOOLS)
    assert words.spell(first.tokens) == rendered(shown[:2], opening=True)
    said = rendered(shown[:3]).removeprefix(rendered(shown[:2], opening=True)).removesuffix("\n")
    [call] = form_of(words.chat_template).parse(said.removesuffix("<|im_end|>"), str).calls
    numbers = shown[1]["content"].removeprefix("What is ").removesuffix("?")
    assert (call.name, json.loads(call.arguments)) == ("calculator", {"expression": numbers})
    answer = Message("assistant", calls=(ToolCall(call.id, call.name, call.arguments),))
    held = first.tokens + words.encode(said, special_tokens=False)
    bridge.add(CompletedTurn("0", (*history, answer), TOOLS, held))
    second = bridge.next((*history, answer, Message("tool", shown[3]["content"], call_id=call.id)), TOOLS)
    assert (second.cause, words.spell(second.tokens)) == ("", rendered(shown[:4], opening=True))


def test_digits_stay_by_themselves_and_a_conversation_is_short(words: Tokenizer) -> None:
    assert [words.spell((token,)) for token in words.encode("12*37", special_tokens=False)] == ["1", "2", "*", "3", "7"]
    assert len(words.encode(rendered(next(conversations(4, seed=1))), special_tokens=False)) < 64
