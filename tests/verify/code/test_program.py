"""Which part of an answer is the program.

Promises: the last finished block that says it is Python, or that says nothing where none does; an answer without any
block is a program itself; an answer that goes on from the head of a function is put behind it; thoughts, unfinished
blocks and other languages are no programs; a block has no margin of the list it stands in.
"""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto_verify.code.program import defines, extract_program, helpers


@pytest.mark.parametrize(
    ("answer", "program"),
    [
        *[("print(1)", "print(1)"), ("```python\nprint(1)\n```", "print(1)\n")],
        ("```py\nprint(1)\n```\nthen\n```Python3\nprint(2)\n```\nbye", "print(2)\n"),
        *[("```\nprint(1)\n```", "print(1)\n"), ("~~~python\nprint(1)\n~~~", "print(1)\n")],
        ("  ```python\n  x\n  ```", "x\n"),
        ("1. First\n\n   ```python\n   if 1:\n     print(1)\n\n   ```\n2. Done", "if 1:\n  print(1)\n\n"),
        *[("- ```python\n  print(1)\n  ```", "print(1)\n"), ("10) ~~~py\n    print(1)\n    ~~~", "print(1)\n")],
        ("\t```python\n\tx = 1\n\tprint(x)\n\t```", "x = 1\nprint(x)\n"),
        ("  ```python\nprint(1)\n if 0: pass\n  ```", "print(1)\nif 0: pass\n"),
        ("```python\nprint(1)\n```\nIt prints\n```\n1\n```", "print(1)\n"),
        ("```python\nprint(1)\n```\n```\nprint(2)\n```\n```py\nprint(3)\n```\n~~~\n3\n~~~", "print(3)\n"),
        ("```\nprint(1)\n```\nor\n```\nprint(2)\n```\n```text\n2\n```", "print(2)\n"),
        ("````python\ns = '''\n```\n'''\n````", "s = '''\n```\n'''\n"),
        ("```python title=a.py\nprint(1)\n```", "print(1)\n"),
        ("```python\nprint(1)\n```\n```bash\npip install x\n```", "print(1)\n"),
        ("<think>```python\nprint(1)\n```</think>\n```python\nprint(2)\n```", "print(2)\n"),
        *[("```python\nprint(1)\n```\nor\n```python\nprint(2)", "print(1)\n"), ("```python\nprint(1)", None)],
        *[("```c\nint main() {}\n```", None), ("<think>```python\nprint(1)\n```</think>", None), ("", None)],
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


HELPER = "import math\n\ndef half(n):\n    return n / 2\n"


@pytest.mark.parametrize(
    ("preamble", "beside"),
    [
        *[("", ""), (HEAD, ""), ("def add(a, b):", ""), ("def add(a, b):\n    '''Both.'''\n", "")],
        (HELPER, "import math\ndef half(n):\n    return n / 2"),
        (HELPER + HEAD, "import math\ndef half(n):\n    return n / 2"),
        (f"{HELPER}\n@functools.cache\ndef add(a, b):\n  '''Both.'''\n", "import math\ndef half(n):\n    return n / 2"),
        (f"from __future__ import annotations\n{HELPER}{HEAD}", "import math\ndef half(n):\n    return n / 2"),
        *[("import math\nclass Solution:\n    def add(self, a, b):", "import math"), ("Add two numbers.", "")],
    ],
)
def test_the_helpers_of_a_preamble_are_all_of_it_but_the_function_that_is_asked_for(preamble: str, beside: str) -> None:
    assert helpers(preamble, "add") == beside


@given(st.text(alphabet="abc\n `~python-1.", max_size=60))
def test_whatever_an_answer_is_the_lines_of_the_program_are_lines_of_it(answer: str) -> None:
    program = extract_program(answer)
    if program is not None:
        lines = {line.strip() for line in answer.split("\n")}
        assert program.strip()
        assert {line.strip() for line in program.split("\n")} <= lines | {""}


@given(st.text(max_size=40))
def test_no_text_is_too_strange_to_look_for_a_definition(text: str) -> None:
    assert not defines(text, "f f")


FENCED = 'text = """\n```\ncode\n```\n"""\nprint(text)\n'


@pytest.mark.parametrize(
    ("completion", "program"),
    [
        (f"```python\n{FENCED}```", FENCED),
        (f"First\n```python\nprint(1)\n```\nthen\n```python\n{FENCED}```\nDone: ```", FENCED),
        (f"```python\n{FENCED}```\nIt prints\n```\ncode\n```", FENCED),
        ("```python\nprint(\n```\nbroken, so\n```python\nprint(2)\n```", "print(2)\n"),
        ("```python\nprint(\n```\n", "print(\n"),
        ("````python\nx = 1\n```\n", None),
    ],
)
def test_a_fence_in_a_text_of_the_program_closes_nothing(completion: str, program: str | None) -> None:
    assert extract_program(completion) == program


@pytest.mark.parametrize("piece", ["a", " ", "1+", "a.b", "`", "~", "\t"])
def test_a_fence_is_read_in_one_pass(piece: str) -> None:
    start = time.process_time()
    extract_program("```" + piece * (400_000 // len(piece)) + "`\n")
    assert time.process_time() - start < 5.0  # a fiftieth of it; in two nested passes, half an hour
