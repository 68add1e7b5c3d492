"""Which part of an answer is the program.

Promises: the last finished block of Python; an answer without any block is a program itself; an answer that goes on
from the head of a function is put behind it; thoughts, unfinished blocks and other languages are no programs.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.rewards.program import defines, extract_program


@pytest.mark.parametrize(
    ("answer", "program"),
    [
        ("print(1)", "print(1)"),
        ("```python\nprint(1)\n```", "print(1)\n"),
        ("```py\nprint(1)\n```\nthen\n```Python3\nprint(2)\n```\nbye", "print(2)\n"),
        ("```\nprint(1)\n```", "print(1)\n"),
        ("~~~python\nprint(1)\n~~~", "print(1)\n"),
        ("  ```python\n  x\n  ```", "  x\n"),
        ("````python\ns = '''\n```\n'''\n````", "s = '''\n```\n'''\n"),
        ("```python title=a.py\nprint(1)\n```", "print(1)\n"),
        ("```python\nprint(1)\n```\n```bash\npip install x\n```", "print(1)\n"),
        ("<think>```python\nprint(1)\n```</think>\n```python\nprint(2)\n```", "print(2)\n"),
        ("```python\nprint(1)\n```\nor\n```python\nprint(2)", "print(1)\n"),
        ("```python\nprint(1)", None),
        ("```c\nint main() {}\n```", None),
        ("<think>```python\nprint(1)\n```</think>", None),
        ("", None),
        ("```python\n\n```", None),
    ],
)
def test_the_program_is_the_last_finished_block_of_python(answer: str, program: str | None) -> None:
    assert extract_program(answer) == program


HEAD = "def add(a, b):\n"


@pytest.mark.parametrize(
    ("answer", "program"),
    [
        ("    return a + b", HEAD + "    return a + b"),
        ("```python\ndef add(a, b):\n    return b + a\n```", "def add(a, b):\n    return b + a\n"),
        ("add = sum", "add = sum"),
        ("class Solution:\n    def add(self, a, b): return 1", "class Solution:\n    def add(self, a, b): return 1"),
        ("from operator import add", "from operator import add"),
    ],
)
def test_an_answer_may_go_on_from_the_head_of_the_function(answer: str, program: str) -> None:
    assert extract_program(answer, HEAD, "add") == program


@given(st.text(alphabet="abc\n `~python", max_size=60))
def test_whatever_an_answer_is_the_program_is_a_part_of_it(answer: str) -> None:
    program = extract_program(answer)
    assert program is None or (program.strip() and program in answer)


@given(st.text(max_size=40))
def test_no_text_is_too_strange_to_look_for_a_definition(text: str) -> None:
    assert not defines(text, "f f")
