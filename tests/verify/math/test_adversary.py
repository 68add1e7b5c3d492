"""Answers that are written to be right for more than they say, and right answers that look like them.

Promises: no answer is right for two different golds, whatever joins its candidates; the question written back is not
its solution; a difference counts however small it is and wherever it hides; what is said about an answer, before or
behind it, does not hide it; an answer that cannot be read or computed is wrong, and a gold answer that cannot stays
undecided.
"""

from __future__ import annotations

import pytest

from stretto_verify.math.reward import gold, math
from stretto_verify.verdicts import Undecided


def verdict(expected: str, completion: str, prompt: str = "") -> str:
    try:
        return "right" if math(prompt, completion, expected) else "wrong"
    except Undecided:
        return "undecided"


def boxed(answer: str) -> str:
    return rf"\boxed{{{answer}}}"


_JOINTS = r"""
, ; : / | || \mid \vert \| \backslash \quad \, \; \! ~ \\ & \& \# \_ _ \to \rightarrow \Rightarrow \implies \iff
=> \mapsto \leftrightarrow → ⇒ \vee \lor ∨ \wedge \land ∧ \cup \cap \oplus \odot \circ \bullet • \star \parallel
‖ \perp \sim \approx \equiv \doteq \propto \neq \in \notin \ni \subset \supset \setminus ' ` @ ? ! == :=
\stackrel{?}{=} \overset{or}{=} = or and vs then maybe \text{or} \text{and} \text{not} \mathrm{or}
\operatorname{or} \space \hspace{1cm} \newline \par \phantom{0} \smash{} {} () \{\} \% \label{a} \tag{1} \vdash
\top \Box \checkmark \dagger \therefore \because \cdot\cdot \bowtie \asymp \prec \ll \tiny \color{red} \not
\atop \choose \over \uparrow │ ¦ ／ 、 ； 。 (A) \textbf{or}
"""
JOINTS = _JOINTS.split()
FRAMES = [r"\boxed{%s}", "The answer is $x = %s$."]


#: Each in one of the frames, in turn, and in the long tests in the other one as well.
FRAMED = [
    pytest.param(joint, frame, marks=[] if (number + other) % 2 == 0 else [pytest.mark.long])
    for number, joint in enumerate(JOINTS)
    for other, frame in enumerate(FRAMES)
]


@pytest.mark.parametrize(("joint", "frame"), FRAMED)
def test_candidates_are_right_for_none_of_them_whatever_joins_them(joint: str, frame: str) -> None:
    for text in (joint, f" {joint} "):
        completion = frame % text.join(["41", "37", "52"])
        assert [one for one in ("41", "37", "52") if verdict(one, completion) == "right"] == []


CHOICES = [
    "(A)(B)(C)(D)(E)",
    "(A)(B)(C)(D)(E) 42",
    "(A) (B)",
    "(A), (B)",
    "A) (B)",
    "A. B. C.",
    "A B C",
    r"\text{(A)} \text{(B)}",
    r"\textbf{(A)}\ \textbf{(B)}",
    "(A) 42 (B) 42 (C) 42",
    "(A) or (B)",
    "(A) = (B)",
    r"(A) \cup (B)",
    "(A) B",
    "ABCDE",
    r"\{A, B, C\}",
]
GOLDS = [
    "A",
    "B",
    "C",
    "D",
    "E",
    "(A)",
    "(B)",
    "42",
    "41",
    "(42)",
    "x=41",
    "42 cm",
    r"\{41, 42\}",
    "yes",
    "no",
]
# On a slow machine the limit of time may strike in a callback of the garbage collector, where it is shown, not raised;
# it strikes again a moment later.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

HEDGES = [
    *CHOICES,
    *(
        "41, 42",
        r"\{41, 42\}",
        "(41, 42)",
        "41 = 42",
        "x = 41 = 42",
        "yes, no",
        "yes and no",
        "41 cm = 42 cm",
        "[41, 42]",
    ),
    *("41 = 41", "42 = 42", r"41 \neq 42", "41.5 \\pm 0.5", "(41)(42)", "41(42)", "41_42", "41^42", r"\frac{41}{42}"),
]


@pytest.mark.parametrize("hedge", HEDGES)
def test_no_answer_is_right_for_two_different_golds(hedge: str) -> None:
    right = [one for one in GOLDS if verdict(one, boxed(hedge)) == "right"]
    pairs = [(one, other) for one in right for other in right if verdict(one, boxed(other)) == "wrong"]
    assert pairs == []


@pytest.mark.parametrize(
    ("expected", "answer"),
    [
        *(
            ("A", "(A) 5"),
            ("5", "(A) 5"),
            ("(A) 5", "5"),
            ("(A) 5", "A"),
            ("A", "(A) B"),
            ("C", "(C) P(A)"),
            ("B", "B. 12"),
        ),
        ("D", r"(D) P(A)\cdot P(B)"),
        ("B", r"\textbf{(B)}\ \text{triangle } ABC"),
    ],
)
def test_one_choice_is_its_letter_and_what_it_stands_for(expected: str, answer: str) -> None:
    assert verdict(expected, boxed(answer)) == "right"


WRITTEN_BACK = [
    ("x=3", ["2x+1=7", "x-3=0", "2x=6", "0=x-3", r"\frac{x}{3}=1", "x+x=6", "3-x=0", "4x-12=0", "x+0=3"]),
    ("x>3", ["2x+1>7", "x-3>0", "2x>6", "6<2x", "0<x-3"]),
    (r"x \le 2", [r"2x \le 4", r"x-2 \le 0"]),
    ("1<x<3", ["2<x+1<4", "2<2x<6", "0<x-1<2"]),
    (r"x \neq 2", [r"2x \neq 4", r"x-2 \neq 0"]),
    ("x=1,y=2", ["x+y=3,x-y=-1", "2x=2,y=2"]),
    ("x=1 \\text{ or } x=2", ["(x-1)(x-2)=0", "x^2-3x+2=0", "2x=2 \\text{ or } 2x=4"]),
    (r"\theta = \frac{\pi}{6}", [r"2\theta = \frac{\pi}{3}"]),
]


@pytest.mark.parametrize(("solution", "answer"), [(one, back) for one, all_of in WRITTEN_BACK for back in all_of])
def test_an_equation_that_is_still_to_be_solved_is_not_its_solution(solution: str, answer: str) -> None:
    assert verdict(solution, boxed(answer)) == "wrong"


@pytest.mark.parametrize(
    ("expected", "answer"),
    [
        *(
            ("x=3", "3=x"),
            ("x=3", r"x=\frac{6}{2}"),
            ("x=3", "3"),
            ("x>3", "3<x"),
            ("x>3", r"(3,\infty)"),
            ("x>3", r"x\in(3,\infty)"),
        ),
        *(
            ("y=2x+1", "2x-y+1=0"),
            ("2x+y=1", "y=1-2x"),
            ("1<x<3", "(1,3)"),
            ("1<x<3", "3>x>1"),
            ("5", "|AB| = 5"),
            ("5", "|P(2)| = 5"),
        ),
    ],
)
def test_what_is_solved_may_be_written_in_every_way(expected: str, answer: str) -> None:
    assert verdict(expected, boxed(answer)) == "right"


@pytest.mark.parametrize(
    ("expected", "answer"),
    [
        *(
            ("x=3", "-x=-3"),
            ("x>3", "-x<-3"),
            (r"x \le 2", r"-x \ge -2"),
            ("[1,2]", r"1\le x\le 2"),
            ("(1,2)", "1<x<2"),
        ),
        *((r"(-\infty,0)\cup(0,\infty)", r"x\neq 0"), (r"(-\infty,1)\cup(2,\infty)", r"x<1\text{ or }x>2")),
    ],
)
def test_what_is_solved_but_for_its_form_is_right_unless_the_question_has_it(expected: str, answer: str) -> None:
    assert verdict(expected, boxed(answer)) == "right"
    assert verdict(expected, boxed(answer), f"Solve the following: ${answer}$, and be brief.") == "wrong"


def test_the_equation_of_the_question_is_not_its_solution_but_may_be_the_answer_to_another() -> None:
    solve = "Write $2x - y + 1 = 0$ in the form $y = mx + b$."
    assert verdict("y=2x+1", boxed("2x-y+1=0"), solve) == "wrong"
    assert verdict("y=2x+1", boxed("y=1+2x"), solve) == "right"
    assert verdict("y=2x+1", boxed("2x-y+1=0"), "Which line is it?") == "right"
    assert verdict("y=2x+1", boxed("y=2x+1"), "Which one: (A) $y=2x+1$ or (B) $y=x$?") == "right"


@pytest.mark.parametrize(
    ("expected", "answer"),
    [
        *(("x", rf"x+\sin({n}\pi x)") for n in (1, 2, 12, 8192, 2**20, 5040 * 8192)),
        *((r"\sqrt2", rf"\sqrt2+10^{{-{n}}}") for n in (7, 30, 51, 52, 60, 121, 400, 5000)),
        *(("x", f"x+10^{{-{n}}}") for n in (51, 200)),
        (r"\pi", r"\pi+(\sqrt{10^{200}+1}-10^{100})"),
        (r"\sqrt2", r"\sqrt2\cdot(1+2^{-300})"),
        (r"\sqrt2\cdot10^{-300}", r"\sqrt3\cdot10^{-300}"),
        ("x^2", r"x^2+\sin(\pi x)^{2}\cdot10^{-60}"),
        ("3x-y+13=0", "3x-y+13+10^{-60}=0"),
        (r"\sqrt2", r"\sqrt2+1/400!"),
        ("0", r"10^{-99}\sqrt2"),
    ],
)
def test_a_difference_counts_however_small_it_is_and_wherever_it_hides(expected: str, answer: str) -> None:
    assert verdict(expected, boxed(answer)) == "wrong"


@pytest.mark.parametrize(
    ("expected", "answer"),
    [
        (r"\sqrt2", r"(10^{50}+\sqrt2)-10^{50}"),
        (r"\sqrt2+10^{-51}", r"10^{-51}+\sqrt2"),
        ("1", r"\sin^2 1+\cos^2 1"),
        (r"10^{-300}\sqrt8", r"2\sqrt2\cdot10^{-300}"),
        (r"\sqrt{5+2\sqrt6}", r"\sqrt2+\sqrt3"),
        ("0", r"\sqrt{5+2\sqrt6}-\sqrt2-\sqrt3"),
    ],
)
def test_equal_numbers_are_equal_at_every_size(expected: str, answer: str) -> None:
    assert verdict(expected, boxed(answer)) == "right"


@pytest.mark.parametrize(
    ("expected", "completion"),
    [
        # rows with a distance between them
        (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", boxed(r"\begin{pmatrix}1&2\\[4pt]3&4\end{pmatrix}")),
        (r"\begin{pmatrix}1\\2\\3\end{pmatrix}", boxed(r"\begin{pmatrix}1\\[0.5em]2\\ [1ex]3\end{pmatrix}")),
        # a denial that is over
        *(
            ("5", text)
            for text in (
                r"never zero so \boxed{5}",
                "It is not even, hence 5.",
                "not six but 5",
                "It cannot be six so it is 5",
            )
        ),
        *(("5", text) for text in ("It isn't six, therefore 5.", r"not divisible by three thus \boxed{5}")),
        *(("Friday", text) for text in (r"not Tuesday but \boxed{Friday}", "The answer is not Tuesday but Friday.")),
        # a choice with its content
        *(
            ("D", text)
            for text in (
                r"The correct answer is (D) $\frac37$.",
                "The answer is (D) 5 apples",
                "Answer: D) $x+1$",
                "The answer is D. 12",
            )
        ),
        (r"\frac37", r"The correct answer is (D) $\frac37$."),
        # a stance with its reason
        *(
            ("Yes", text)
            for text in ("Yes, since the angles sum to 180 degrees.", "Yes because 2+2=4", "yes - as 7 is prime")
        ),
        ("No", "No, because 15 = 3*5."),
        # what is said of the names
        *(
            ("x+c", boxed(rf"x+c{said}"))
            for said in (
                r" \text{ where } c \text{ is a constant}",
                r", c \in \mathbb{R}",
                r"\text{ for some constant } c",
            )
        ),
        *(
            ("2^{n-1}", boxed(f"2^{{n-1}}{said}"))
            for said in (
                r", n\ge1",
                r", n \geq 1",
                r" \text{ for } n \ge 1",
                r"\ (n > 0)",
                r", n=1,2,3,\ldots",
                r", n\in\mathbb{N}",
            )
        ),
        (r"\frac{1}{x}", boxed(r"\frac{1}{x}, x \neq 0")),
        # absolute values
        *(
            ("5", boxed(text))
            for text in ("|AB|=5", r"\left|\vec{a}\right|=5", r"\lVert v\rVert = 5", "|z| = 5", "|f(2)|=5")
        ),
        *(
            (one, boxed(other))
            for one, other in (
                ("|x-1|+|x+2|", "|x+2|+|x-1|"),
                ("|x|y", r"y\left|x\right|"),
                (r"\frac{|x|}{x}", r"|x|/x"),
            )
        ),
        # sums and products with their parts in another order
        *(
            (one, boxed(other))
            for one, other in (
                (r"\sum_{k=1}^n k(k+1)", r"\sum_{k=1}^n (k+1)k"),
                (r"\sum_{i=1}^{n} a_i b_i", r"\sum_{i=1}^{n} b_i a_i"),
                (r"\sum_{k=1}^n \frac{x}{k+2}", r"\sum_{j=1}^n \frac{x}{2+j}"),
                (r"\prod_{k=1}^n (k+x)", r"\prod_{k=1}^n (x+k)"),
                (r"x\sum_{k=1}^{n} k^2", r"\sum_{k=1}^{n} k^2 x"),
                (r"\sum_{k=1}^{n} k", r"\frac{n(n+1)}{2}"),
                (r"\frac{n(n+1)(n+2)}{3}", r"\sum_{k=1}^n k(k+1)"),
                ("55", r"\sum_{k=1}^{10} k"),
            )
        ),
        # a comma that is a point
        *(("2.75", boxed(text)) for text in ("2{,}75", "2{,}7500")),
        ("0.5", "The value is $0{,}5$."),
    ],
)
def test_what_is_said_around_an_answer_does_not_hide_it(expected: str, completion: str) -> None:
    assert verdict(expected, completion) == "right"


@pytest.mark.parametrize(
    ("expected", "completion"),
    [
        ("5", r"never \boxed{5}"),
        ("5", r"It is 6 but not \boxed{5}"),
        ("180", "Yes, since the angles sum to 180 degrees."),
        ("x=5", boxed("x=5 or x=6")),
        ("x<5", boxed("x<5, x>1")),
        (r"\frac{1}{x}, x>0", boxed(r"\frac{1}{x}, x<0")),
        ("0", boxed("f(x) - x = 0")),
        ("5", boxed("|x| = 5")),
        ("A", r"The correct answer is (D) $A$."),
        (r"\sum_{k=1}^n k(k+1)", boxed(r"\sum_{k=1}^n k(k+2)")),
        (r"\frac{n(n+1)}{2}", boxed(r"\sum_{k=1}^n (k+(k-2)(k-3)(k-4)(k-5))")),
        ("56", boxed(r"\sum_{k=1}^{10} k")),
        (r"\sum_{k=1}^n k^n", boxed(r"\sum_{k=1}^{n+1} k^n")),
        ("2750", boxed("2{,}75")),
        ("2.75", boxed("2{,}750")),
    ],
)
def test_what_is_said_around_an_answer_counts_where_it_changes_it(expected: str, completion: str) -> None:
    assert verdict(expected, completion) == "wrong"


EXCESS = {
    "a tower": "9^{9^{9^9}}",
    "digits": "1" * 2000,
    "brackets": "(" * 60 + "1" + ")" * 60,
    "operations": "1+" * 300 + "1",
    "letters": "a" * 3000,
    "a factorial": "(10^{100000})!",
    "a sum": r"\sum_{k=1}^{10^9} \frac{1}{k^k}",
    "open braces": r"\frac{{{",
    "signs of no meaning": r"2 @@ 3 \foo",
    "bars, which take seconds to parse": "|x|" * 30,
    "a magnitude": r"\sqrt2+10^{-40000}",
}


@pytest.mark.parametrize("excess", EXCESS)
@pytest.mark.parametrize("expected", ["5", r"\sqrt2", "x=3", "(1,2)"])
def test_an_answer_that_cannot_be_read_or_computed_is_wrong(excess: str, expected: str) -> None:
    assert verdict(expected, boxed(EXCESS[excess])) == "wrong"


def test_a_completion_beyond_the_limit_is_wrong() -> None:
    assert verdict("5", "x" * (1 << 20) + boxed("5")) == "wrong"


@pytest.mark.parametrize("broken", ["9^{9^{9^9}}", r"\frac{{{", r"2 @@ 3 \foo", "|x|" * 30 + "|"])
def test_a_gold_answer_that_cannot_be_read_is_nobodys_fault(broken: str) -> None:
    with pytest.raises(Undecided):
        gold("", "", broken)
    assert verdict(broken, boxed("5")) == "undecided"
