"""Calls are read back as they were written, in the form of every family, whatever text their arguments hold; what is
malformed is text.
"""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto_workflows.chat.messages import ToolCall
from stretto_workflows.chat.tool_calls import (
    CallForm,
    HermesForm,
    LlamaForm,
    MistralForm,
    Parsed,
    form_of,
    split_reasoning,
)

FORMS: list[CallForm] = [HermesForm(), LlamaForm(), MistralForm()]
MARKS = st.sampled_from(["<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", "; "])
TEXTS = st.text() | st.lists(MARKS | st.text()).map("".join)
ARGUMENTS = st.dictionaries(TEXTS, st.none() | st.booleans() | st.integers() | TEXTS | st.lists(TEXTS))


@pytest.mark.parametrize("form", FORMS, ids=lambda form: type(form).__name__)
@given(drawn=st.lists(st.tuples(TEXTS.filter(bool), ARGUMENTS), min_size=1, max_size=3), spaces=st.booleans())
def test_a_rendering_parses_exactly(form: CallForm, drawn: list[tuple[str, dict[str, object]]], spaces: bool) -> None:
    written = [json.dumps(arguments, separators=None if spaces else (",", ":")) for _, arguments in drawn]
    calls = tuple(
        ToolCall(str(place), name, text) for place, ((name, _), text) in enumerate(zip(drawn, written, strict=True))
    )
    assert form.parse(form.render(calls), str) == Parsed("", calls)


@pytest.mark.parametrize("form", FORMS, ids=lambda form: type(form).__name__)
@given(text=st.text() | st.text(alphabet='<>/tool_ca{}[]":; TOLCAS\\u0d8', max_size=40))
def test_any_text_is_read_without_an_error(form: CallForm, text: str) -> None:
    parsed = form.parse(text, str)
    assert parsed.calls or parsed.text == text


CALL = ToolCall("0", "add", '{"a": 1}')


@pytest.mark.parametrize(
    ("form", "text", "wanted"),
    [
        (
            HermesForm(),
            'So: <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>\n',
            Parsed("So: \n", (CALL,)),
        ),
        (LlamaForm(), '<|python_tag|>{"name": "add", "parameters": {"a": 1}}', Parsed("", (CALL,))),
        (MistralForm(), 'So: [TOOL_CALLS]add[ARGS]{"a": 1}', Parsed("So: ", (CALL,))),
        (MistralForm(), '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}}]', Parsed("", (CALL,))),
    ],
)
def test_the_forms_of_the_families(form: CallForm, text: str, wanted: Parsed) -> None:
    assert form.parse(text, str) == wanted


QUOTED = [
    (HermesForm(), '<tool_call>\n{"name": "write", "arguments": %s}\n</tool_call>', "<tool_call>a</tool_call>"),
    (MistralForm(), '[TOOL_CALLS][{"name": "write", "arguments": %s}]', "[TOOL_CALLS]"),
    (MistralForm(), "[TOOL_CALLS]write[ARGS]%s", "[TOOL_CALLS]add[ARGS]{}"),
]


@pytest.mark.parametrize(("form", "written", "mark"), QUOTED)
def test_an_argument_may_quote_the_marks_of_a_call(form: CallForm, written: str, mark: str) -> None:
    arguments = json.dumps({"text": f"a call is {mark}"})
    assert form.parse(written % arguments, str) == Parsed("", (ToolCall("0", "write", arguments),))


@pytest.mark.parametrize(("form", "written", "mark"), [QUOTED[0], QUOTED[2]])
def test_a_call_behind_one_that_quotes_marks_is_read(form: CallForm, written: str, mark: str) -> None:
    arguments = json.dumps({"text": mark})
    calls = (ToolCall("0", "write", arguments), ToolCall("1", "write", arguments))
    assert form.parse(2 * (written % arguments), str) == Parsed("", calls)


GOOD = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'


@pytest.mark.parametrize(
    ("form", "text"),
    [
        *[(HermesForm(), GOOD.removesuffix("</tool_call>")), (HermesForm(), f"{GOOD}<tool_call>")],
        (HermesForm(), f'{GOOD}<tool_call>{{"name": "add", "arguments": "1+2"}}</tool_call>'),
        (HermesForm(), '<tool_call>{"name": "add", "arguments": {"a": NaN}}</tool_call>'),
        (HermesForm(), '<tool_call>{"name": "add", "arguments": {"a": "\\ud800"}}</tool_call>'),
        (HermesForm(), '<tool_call>{"name": "", "arguments": {}}</tool_call>'),
        *[(HermesForm(), "<tool_call>add(1, 2)</tool_call>"), (LlamaForm(), 'I say {"name": "add", "parameters": {}}')],
        *[(LlamaForm(), '{"name": "add", "parameters": {}} and more'), (LlamaForm(), '{"answer": 3}')],
        *[(MistralForm(), "[TOOL_CALLS]"), (MistralForm(), '[TOOL_CALLS][{"name": "add"')],
        (MistralForm(), '[TOOL_CALLS]add[ARGS]{}, "name": "other"'),
        *[(MistralForm(), "[TOOL_CALLS]12345{}"), (MistralForm(), '[TOOL_CALLS]add{"a": 1}')],
        *[
            (MistralForm(), "[TOOL_CALLS]a[TOOL_CALLS]add[ARGS]{}"),
            (MistralForm(), "[TOOL_CALLS]add[ARGS]{}[TOOL_CALLS]"),
        ],
        (HermesForm(), '<tool_call>{"name": "add", "arguments": {}} and more</tool_call>'),
        (HermesForm(), '<tool_call>{"name": "add", "arguments": {"a": "</tool_call>"}} and more</tool_call>'),
        (HermesForm(), "<tool_call>" + '{"name": "a", "arguments": {"b": ' + "[" * 5000 + "</tool_call>"),
    ],
)
def test_malformed_calls_are_text(form: CallForm, text: str) -> None:
    assert form.parse(text, str) == Parsed(text)


@pytest.mark.parametrize(
    ("form", "before", "again_and_again", "behind"),
    [
        (HermesForm(), "", "<tool_call>", ""),
        (HermesForm(), GOOD, "<tool_call>", ""),
        (HermesForm(), "", '<tool_call>{"a": "</tool_call>', ""),
        (MistralForm(), "", '[TOOL_CALLS]add[ARGS]{"a": "', ""),
        (LlamaForm(), "", '{"a": 1}; ', "and more"),
    ],
)
def test_a_long_message_of_broken_calls_is_text(form: CallForm, before: str, again_and_again: str, behind: str) -> None:
    text = before + 200_000 * again_and_again + behind  # to look for the end of each call anew would take hours
    assert (form.parse(text, str) == Parsed(text)) is True


def test_a_template_tells_its_form() -> None:
    assert isinstance(form_of("... <tool_call> ..."), HermesForm)
    assert isinstance(form_of('{"name": "x", "parameters": y}'), LlamaForm)
    assert isinstance(form_of("[TOOL_CALLS]"), MistralForm)
    assert isinstance(form_of(""), HermesForm)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("<think>\nsmall\n</think>\n\n3", ("small", "3")),
        ("small</think>3", ("small", "3")),  # its beginning was in the prompt
        ("<think>without an end", ("without an end", "")),
        ("3", ("", "3")),
        ("<thinking>small</thinking>3 ends </think>", ("small", "3 ends </think>")),
    ],
)
def test_reasoning_is_split_from_the_answer(text: str, wanted: tuple[str, str]) -> None:
    assert split_reasoning(text) == wanted
