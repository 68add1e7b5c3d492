"""Kinds of final answers that reasoning models write, and what is nearly the same.

Promises: products of units, bases, parts of a question, ranges, intervals in a list, multiples of matrices, unit
vectors, values given twice, sentences, remainders, fractions in one sign and rare spellings are read; another modulus,
another unit, other parts and the side of an equation are not right.
"""

import pytest

from stretto_verify.math.reward import gold
from tests.verify.math.judged import verdict
from tests.verify.tables import cases

TABLES = {
    "units as products": r"""
25\ \text{m/s} ☑ 25\ \mathrm{m\,s^{-1}} ☑ 25\,\mathrm{m \cdot s^{-1}} ☑ 25 \frac{\mathrm{m}}{\mathrm{s}}
☑ 90\text{ km/h}
☒ 25\ \mathrm{m\,s^{-2}} ☒ 25\ \mathrm{m\,s} ¦ 42 ☑ 42\,\mathrm{N\cdot m} ☑ 42\ \mu\text{m} ☑ 42\,\Omega
☒ 42\,\mathrm{m}^{x}
8.3 \mathrm{~J} \mathrm{~mol}^{-1} \mathrm{~K}^{-1} ☑ 8.3\ \text{J/(mol K)} ☑ 8.3\,\mathrm{J/(mol\cdot K)}
☒ 8.3\,\mathrm{J\,mol^{-1}}
42 \text{ N/m} ☑ 42\text{ N}/\text{m} ☑ 42\,\mathrm{N\,m^{-1}} ☑ 42\text{ newtons per meter} ☒ 42\,\mathrm{N\cdot m}
☒ 42\text{ N s} ¦ 42\text{ N}\cdot\text{m} ☑ 42\text{ newton meters} ☒ 42\text{ N/m}
42\text{ W/m}^2 ☑ 42\text{ watts per square meter} ☒ 42\text{ kW/m}^2
42 ✗ So June 9 m s^{-1}, and {}^{-42}.
""",
    "bases and remainders": r"""
101_2 ☑ 101_{(2)} ☑ 101\text{ (base 2)} ☑ 101\text{ in base }2 ☑ \text{101}_2 ☒ 101\text{ (base 3)} ☒ 1012
2A_{16} ☑ 2A
3 \pmod 7 ☑ 3 \bmod 7 ☑ 10 \bmod 7 ☒ 4 \bmod 7 ¦ n \equiv 1 \pmod 4 ☑ n\equiv1\bmod 4 ☒ n\equiv1\pmod 8
☒ n\equiv3\pmod 4
""",
    "parts of a question": r"""
\text{(1) } 5; \text{(2) } 7 ☑ (1) 5; (2) 7 ☑ 5; 7 ☒ (1) 7; (2) 5 ☒ (1) 5 ¦ 5 ☒ (1) 5; (2) 7 ¦ 1 ☒ (1) 5; (2) 7
""",
    "ranges": r"""
[1,4) ☑ 1 \le x \text{ and } x < 4 ☑ x\geq 1, x<4 ☑ 4>x,\ x\ge1 ☒ x\ge1, x>4 ☒ x<1, x\ge4 ☒ 1<x \text{ and } x<4
(-\infty,2)\cup(3,\infty) ☑ (-\infty,2)\bigcup(3,\infty) ☑ (-\infty,2)\text{ or }(3,\infty) ☑ x<2,\ x>3
☒ (-\infty,2),(4,\infty)
(1,2)\cup(3,4) ☒ (1,2),(3,4) ¦ x > 5 ☑ \text{all } x>5 ☒ \text{all } x<5
7 = 11a+c ☒ 11a+c ☒ 7 ¦ 5 = x ☑ 5 ☒ x
""",
    "matrices and vectors": r"""
\frac12\begin{pmatrix}4&-2\\-3&1\end{pmatrix} ☑ \begin{pmatrix}2&-1\\-1.5&0.5\end{pmatrix}
☒ \begin{pmatrix}4&-2\\-3&1\end{pmatrix}
\begin{pmatrix}-1\\2\end{pmatrix} ☑ -\begin{pmatrix}1\\-2\end{pmatrix} ☒ -\begin{pmatrix}1\\2\end{pmatrix}
(2,-1,3) ☑ 2\mathbf{i}-\mathbf{j}+3\mathbf{k} ☑ 2\hat{\imath}-\hat{\jmath}+3\hat{k}
☒ 2\mathbf{i}+\mathbf{j}+3\mathbf{k}
(2,0,3) ☑ 2\mathbf{i}+3\mathbf{k} ☒ 2\mathbf{j}+3\mathbf{k} ¦ 3+4i ☒ (3,4)
""",
    "one value, given twice": r"""
\frac12 ☑ \frac12\ (\text{or }50\%) ☑ \frac12\text{ (or 0.5)} ☒ \frac12\ (\text{or }\frac13) ¦ \sqrt2
☑ \sqrt2\ (\approx 1.414)
\frac34 ☑ \text{3 out of 4} ☒ \text{3 out of 5} ¦ 120^\circ ☑ \frac{2\pi}{3}\text{ rad} ☒ \frac{\pi}{3}\text{ rad}
""",
    "words": r"""
\text{true} ☑ \text{The statement is true} ☑ \text{Yes} ☒ \text{The statement is not true} ☒ \text{No}
\text{Ann is taller} ☒ \text{Bob is taller} ☒ The answer is: Bob is taller. ¦ \text{The second is even}
☒ \text{The first is even} ¦ Ann is taller ☒ The answer is: Bob is taller.
\text{The function is even} ☑ even ☒ odd ¦ B ☑ \text{Option B} ☑ \text{B: }5 ☑ B) ☒ \text{Option A: }B
☒ \text{Option A}
D ✓ The answer: D, it doesn't make sense for it to be A or B ✓ D。不是 A ¦ A ✗ D。不是 A
\text{infinitely many} ☑ \text{infinitely many solutions} ☒ \text{many} ¦ 12
✓ The maximum is $12$, achieved when $x=2$ and $y=3$.
(2,3) ✗ The maximum is $12$, achieved when $x=2$ and $y=3$.
""",
    "fractions in one sign, notes of a calculator, words in another line": r"""
0.5 ✓ the result is ½ ✗ the result is ½π ¦ 2.5 ✓ answer 2½ ✗ answer 3½ ¦ -0.5 ✓ It is -½.
18 ✓ She makes 9*2=$<<9*2=18>>18 every day. ✗ She makes 9*2=<<9*2=18>>19. ¦ 60 ✓ 28 + 32 = 60⏎This solves the problem.
""",
    "rare spellings": r"""
\sqrt2 ☑ \surd 2 ¦ \sqrt[3]{5} ☑ \root3\of5 ¦ \frac12 ☑ \nicefrac{1}{2} ¦ [1,4) ☑ \lbrack 1, 4) ¦ 3+4i ☑ 3+4\imath
\begin{pmatrix}1&2\\3&4\end{pmatrix} ☑ \begin{pmatrix}1&2\cr3&4\end{pmatrix} ¦ 1,2,3 ☑ 1\quad 2\quad 3 ¦ 1234
☑ 1\text{,}234
\lfloor n/2\rfloor ☑ ⌊n/2⌋ ☑ \text{floor}(n/2) ☒ ⌈n/2⌉ ¦ 42 ☑ 42\ \checkmark ☑ 42\text{ only} ✓ boxed{42}
☑ \text{x = 42}
\frac{\pi}{4}+k\pi ☑ \{\frac{\pi}{4}+n\pi \mid n\in\mathbb{Z}\} ☒ \{\frac{\pi}{4}+2n\pi \mid n\in\mathbb{Z}\}
""",
}


@pytest.mark.parametrize("title", TABLES)
def test_each_kind_is_read_and_what_is_nearly_the_same_is_wrong(title: str) -> None:
    told = cases(TABLES[title])
    assert [(one, answer) for one, answer, right in told if verdict(one, answer) != ("wrong", "right")[right]] == []
    assert all(gold("", "", one) for one, _, _ in told)
