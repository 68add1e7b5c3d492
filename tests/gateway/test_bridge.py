"""The tail of a prompt behind held tokens: what the template of each family writes there, and nothing where that cannot
be proven."""

import pytest

from stretto.core.errors import DataError
from stretto_workflows.chat.bridge import Bridge, CompletedTurn, Renderer
from stretto_workflows.chat.messages import Match, Message, Tool, ToolCall
from tests.gateway.serving import ENDS, tokenizer_of

ADD = Tool("add", "", {"type": "object"})
USER = Message("user", "1+2?")
CALLED = Message("assistant", "", calls=(ToolCall("abcdefghi", "add", '{"a": 1}'),))
RESULT = Message("tool", "3", call_id="abcdefghi", name="add")
SAID = Message("assistant", "It is 3.")
MORE = Message("user", "Sure?")
HERMES = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
#: What the models write for a call, and before a text.
WRITTEN = {
    "qwen2_5": (HERMES, ""),
    "qwen3": (HERMES, ""),
    "llama": ('{"name": "add", "parameters": {"a": 1}}', ""),
    "mistral": ('[TOOL_CALLS][{"name": "add", "arguments": {"a": 1}, "id": "abcdefghi"}]', " "),
}


def sampled(template: str, answer: Message, *, ended: bool = True) -> tuple[int, ...]:
    """The answer as a model would write it, one letter after the other."""
    tokenizer = tokenizer_of(template)
    call, before = WRITTEN[template]
    text = call if answer is CALLED else before + answer.text
    control = "[TOOL_CALLS]"
    ids = tokenizer.encode(control, special_tokens=False) if text.startswith(control) else ()
    letters = [tokenizer.encode(letter, special_tokens=False) for letter in text.removeprefix(control)]
    end = tokenizer.encode(ENDS[template], special_tokens=False) if ended else ()
    return sum(letters, start=ids) + end


@pytest.mark.parametrize("ended", [True, False])
@pytest.mark.parametrize("template", sorted(ENDS))
@pytest.mark.parametrize(("answer", "new"), [(CALLED, (RESULT,)), (SAID, (MORE,)), (CALLED, (RESULT, SAID, MORE))])
def test_held_tokens_and_their_tail_spell_what_the_template_renders(
    template: str, answer: Message, new: tuple[Message, ...], ended: bool
) -> None:
    tokenizer = tokenizer_of(template)
    renderer = Renderer(tokenizer)
    held = renderer.whole((USER,), ()) + sampled(template, answer, ended=ended)
    tail = renderer.tail(answer, held, new, ())
    assert tail is not None
    assert tokenizer.spell(held + tail) == tokenizer.spell(renderer.whole((USER, answer, *new), ()))


@pytest.mark.parametrize("template", sorted(ENDS))
def test_a_message_may_hold_the_words_that_stand_for_the_answer(template: str) -> None:
    tokenizer = tokenizer_of(template)
    renderer, echo = Renderer(tokenizer), Message("user", "No: (the answer that is held) Sure?")
    held = renderer.whole((USER,), ()) + sampled(template, SAID)
    tail = renderer.tail(SAID, held, (echo,), ())
    assert tail is not None
    assert tokenizer.spell(held + tail) == tokenizer.spell(renderer.whole((USER, SAID, echo), ()))


def test_a_template_that_drops_old_reasoning_leaves_what_was_sampled_where_it_is() -> None:
    tokenizer = tokenizer_of("qwen3")
    renderer, thought = Renderer(tokenizer), Message("assistant", "It is 3.", reasoning="hm")
    bridge = Bridge(renderer)
    first = bridge.next((USER,), ())
    written = "<think>\nhm\n</think>\n\nIt is 3.<|im_end|>"
    held = first.tokens + tokenizer.encode(written, special_tokens=False)
    bridge.add(CompletedTurn("0", (USER, thought), (), held))
    second = bridge.next((USER, thought, MORE), ())
    assert second.tokens[: len(held)] == held
    assert second.cause == ""
    assert "hm" not in tokenizer.spell(renderer.whole((USER, thought, MORE), ()))


def test_reasoning_is_what_is_missing_however_the_arguments_are_written() -> None:
    bridge = Bridge(Renderer(tokenizer_of("qwen3")))
    thought = Message("assistant", "", reasoning="hm", calls=CALLED.calls)
    held = (*bridge.next((USER,), ()).tokens, 1, 2, 3)
    bridge.add(CompletedTurn("0", (USER, thought), (), held))
    stripped = Message("assistant", calls=(ToolCall("abcdefghi", "add", '{"a":1}'),))
    assert bridge.next((USER, stripped, RESULT), ()).cause == "reasoning_stripped"


def test_messages_that_the_template_refuses_are_refused() -> None:
    bridge = Bridge(Renderer(tokenizer_of("mistral")))
    held = bridge.next((USER,), ()).tokens + sampled("mistral", SAID)
    bridge.add(CompletedTurn("0", (USER, SAID), (), held))
    with pytest.raises(DataError, match="length 9"):
        bridge.next((USER, SAID, Message("tool", "3", call_id="short")), ())


def test_a_template_that_rewrites_an_answer_by_what_follows_is_a_drift() -> None:
    tokenizer = tokenizer_of("qwen2_5")
    tokenizer._whole.chat_template = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}"
        "{% if m.role == 'assistant' %}{{ '<|im_end|>' if loop.last else '<|endoftext|>' }}{% endif %}{% endfor %}"
    )
    bridge = Bridge(Renderer(tokenizer))
    held = bridge.next((USER,), ()).tokens + sampled("qwen2_5", SAID)
    bridge.add(CompletedTurn("0", (USER, SAID), (), held))
    prompt = bridge.next((USER, SAID, MORE), ())
    assert prompt.cause == "drift"
    assert tokenizer.spell(prompt.tokens) == "user: 1+2?assistant: It is 3.<|endoftext|>user: Sure?"


def test_a_template_without_tools_is_told_of_them_in_words() -> None:
    tokenizer = tokenizer_of("qwen2_5")
    turns = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>{{ '\n' }}{% endfor %}"
    tokenizer._whole.chat_template = turns + "<|im_start|>assistant"
    renderer = Renderer(tokenizer)
    told = tokenizer.spell(renderer.whole((Message("system", "be brief"), USER, CALLED, RESULT, RESULT), (ADD,)))
    assert told.startswith("<|im_start|>system\nbe brief\n\n# Tools\n")
    assert '{"type": "function", "function": {"name": "add"' in told
    assert told.endswith(
        f"<|im_start|>assistant\n{HERMES}<|im_end|>\n<|im_start|>user\n<tool_response>\n3\n</tool_response>\n"
        "<tool_response>\n3\n</tool_response><|im_end|>\n<|im_start|>assistant"
    )


def test_the_ladder_accepts_arguments_that_mean_the_same() -> None:
    bridge = Bridge(Renderer(tokenizer_of("qwen2_5")))
    held = bridge.next((USER,), (ADD,)).tokens + sampled("qwen2_5", CALLED)
    bridge.add(CompletedTurn("0", (USER, CALLED), (ADD,), held))
    rewritten = Message("assistant", "", calls=(ToolCall("abcdefghi", "add", '{"a":1}'),))
    prompt = bridge.next((USER, rewritten, RESULT), (ADD,))
    assert (prompt.match, prompt.cause, prompt.tokens[: len(held)]) == (Match.EQUAL_AS_JSON, "", held)
    assert prompt.history == (USER, CALLED, RESULT)
    other = Message("assistant", "", calls=(ToolCall("abcdefghi", "add", '{"a": 2}'),))
    assert bridge.next((USER, other, RESULT), (ADD,)).cause == "arguments"


def test_an_answer_that_was_given_twice_in_other_tokens_is_not_guessed() -> None:
    tokenizer = tokenizer_of("qwen2_5")
    bridge = Bridge(Renderer(tokenizer))
    prompt = bridge.next((USER,), ()).tokens
    letters = prompt + sampled("qwen2_5", Message("assistant", "the"))
    piece = prompt + tokenizer.encode("the<|im_end|>", special_tokens=False)
    assert tokenizer.spell(letters) == tokenizer.spell(piece)
    said = Message("assistant", "the")
    bridge.add(CompletedTurn("0", (USER, said), (), letters, live=False))
    bridge.add(CompletedTurn("1", (USER, said), (), piece))
    assert bridge.next((USER, said, MORE), ()).tokens[: len(piece)] == piece  # the other was an earlier process's
    bridge.add(CompletedTurn("0", (USER, said), (), letters))
    assert bridge.next((USER, said, Message("user", "Really?")), ()).cause == "ambiguous"
    bridge.add(CompletedTurn("1", (USER, said), (), letters))
    third = bridge.next((USER, said, Message("user", "Yes?")), ())
    assert (third.cause, third.tokens[: len(letters)]) == ("", letters)


def test_the_same_messages_ask_again_once_a_turn_began_with_them() -> None:
    bridge = Bridge(Renderer(tokenizer_of("qwen2_5")))
    refused = bridge.next((USER,), ())
    prompt = bridge.next((USER,), ())
    assert (refused.cause, prompt.cause) == ("", "")
    bridge.begin((USER,), prompt)
    assert bridge.next((USER,), ()).cause == "again"
    assert bridge.next((USER,), (ADD,)).cause != "again"
