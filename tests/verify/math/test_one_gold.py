r"""Completions that nobody wrote: candidates in wrappers, joined by separators, with tails, in frames.

Promises: no completion is right for two golds that differ; only a choice with its content, ``(A) 42``, is right for its
letter and for what it stands for, and for nothing else; a final answer is right only if one reading accounts for all of
it, and what is passed over may be words, never another candidate. `benchmarks/one_gold.py` judges 100,500 completions.
"""

import time

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from benchmarks.one_gold import cases, kind, right_for
from stretto_verify.math.extract.terms import terms
from stretto_verify.math.parse.reading import read
from stretto_verify.math.parse.structure import LeftOver, Scalar, Unreadable, accounts_for, candidates, says_nothing
from tests.verify.math.judged import right

GOLDS = ["A", "B", "C", "D", "42", "43", "7", "yes", "no", "(1,2)"]


LONG = [pytest.param(seed, marks=pytest.mark.long) for seed in (4_000_037, 77_000_001, 900_000_011)]


@pytest.mark.parametrize("seed", [11, *LONG])
def test_no_completion_is_right_for_two_golds(seed: int) -> None:
    told = [(case.completion, found) for case in cases(80, seed) if kind(case, found := right_for(case)) == "two"]
    assert told == []


LISTS = [
    *[r"\boxed{A: B: C: D: 42}", r"\boxed{\mathbf{A}\mathbf{B}\mathbf{C} 42}", r"\boxed{\textbf{A} \textbf{B}: 42}"],
    *[r"\boxed{\mathrm{A}*42}", r"\boxed{\text{A} = 42 = \text{B}}", r"\boxed{A. 42. B. 43}"],
    *["The answer is A. 42. B. 43.", "<answer>The answer is (A). 42. (B). 43</answer>"],
    "<answer>The answer could be anything from 1 to 100, including 42</answer>",
    "<answer>41, 43 or maybe (B), I would say 42</answer>",
    r"\boxed{\begin{cases} 42 & \text{if the answer is } 42 \\ 43 & \text{else} \end{cases}}",
    *[r"\boxed{42\text{, 43, 44}}", r"\boxed{42 \text{ (B)}}", r"\boxed{35 7}", r"\boxed{35\quad 7}"],
    *[r"The answer is $42$, or $(B)$ in the other case.", "The answer is A. 42. D. yes"],
    *["The answer is **A**. **42**. **D**, 7", r"The answer is \mathrm{A} \mathrm{42}. (D)"],
    r"\mathbf{A}. (\mathbf{42}.",
    *[r"Final answer: \mathbf D vs \mathbf \sqrt{2} = 42", r"\boxed{\textbf{(D) } vs. \sqrt{2} = 42}"],
    r"Final answer: \mathbf D if \mathbf \sqrt{2} = 42",
    *["yes, 42", r"no, \frac{84}{2}", "42, yes"],
    *[r"The answer is D. 42. C \text{ if } x>0.", "The answer is B. 42. (1,2)"],
    *["<answer>It could be $D$ is $yes$ is $B$: 42</answer>", "<answer>yes is (1,2) is 7 is D: 42</answer>"],
    *["The answer is (yes) is ((1,2)) is (7) is (D) 42.", "<answer>blue is D: 42</answer>"],
    *["<answer>It could be 7 or (1,2) is D: 42</answer>", "<answer>It could be BAyesblue is D: 42</answer>"],
    *["The answer is 42\nor 7", "The answer is 42. Or 7.", "The answer is (B). Or (C).", r"Answer: $42$" "\n\nor $43$"],
    r"<answer>\textbf{D} \quad \textbf{42} \quad \textbf{blue}, where x is any number</answer>",
]


@pytest.mark.parametrize("completion", LISTS)
def test_several_candidates_are_right_for_none_of_them(completion: str) -> None:
    assert [gold for gold in GOLDS if right(gold, completion)] == []


@pytest.mark.parametrize(
    ("between", "right_for"),
    [
        *[(word, "7") for word in ("finally", "then", "so", "hence", "最後", "最后是", "所以", ". Finally,")],
        *[(word, "42, 7") for word in ("and", "或", "和", "und", ", and then", r"\quad")],
    ],
)
def test_boxes_one_after_the_other_are_no_list(between: str, right_for: str) -> None:
    completion = rf"first \boxed{{42}} {between} \boxed{{7}}"
    assert [gold for gold in ("42", "7", "42, 7") if right(gold, completion)] == [right_for]


numbers = st.integers(10, 10**6)


@settings(max_examples=20)
@given(numbers, numbers, st.sampled_from(["{} but {}", "{} as in {}", "{} (see {})", r"{}\text{{, {}}}", "{}; {}"]))
def test_a_second_number_is_never_passed_over(one: int, other: int, form: str) -> None:
    assume(one != other)
    for frame in (r"\boxed{{{}}}", "<answer>{}</answer>", "The answer is {}"):
        completion = frame.format(form.format(one, other))
        assert [number for number in (one, other) if right(str(number), completion)] == []


TERMS = [
    *[("{0}π", r"{0}\pi"), ("√{0}", r"\sqrt{{{0}}}"), ("{1}√{0}", r"{1}\sqrt{{{0}}}"), ("{0}²", "{0}^2")],
    *[("{1} × 10^3", "{1}000"), ("{1}·10³", "{1}000"), ("{1} x 10^3", "{1}000"), ("{1}^3", "{1}**3")],
    *[("{0} + {1}", "{0}+{1}"), ("{0} - {1}", "{0}-{1}"), ("{1} 3/4", r"{1}\frac34"), ("{0}÷{1}", "{0}/{1}")],
    *[("{1}! + 0", "{1}!"), ("ln({0})", r"\ln {0}"), ("sqrt({0})", r"\sqrt{{{0}}}"), ("{1}(2 + 3)", "{1}*5")],
    *[("{0} and a half", "{0}.5"), ("{1} ± {0}", "49,-35"), ("{0} + {1}i", "{0}+{1}i")],
    *[("{0} choose {1}", r"\binom{{{0}}}{{{1}}}"), (r"{0}\cdot {1}", "{0}*{1}"), ("{1} : {0}", "{1}:{0}")],
]


@pytest.mark.parametrize(("told", "gold"), TERMS)
def test_a_number_in_a_term_is_no_answer_but_the_term_is(told: str, gold: str) -> None:
    one, other = 42, 7
    for frame in ("It is {} of them.", "We get {} in all", "so the area is {} cm."):
        completion = frame.format(told.format(one, other))
        assert right(gold.format(one, other), completion)
        for number in {str(one), str(other), "10", "3", "4", "2", "5"}:
            assert not right(number, completion)


PARTS = "{0} out of {1}, {0} in {1}, {0} per {1}, {0} to {1}, {0} by {1}, {0} remainder {1}, {0} mod {1}, {0} of {1}, "
PARTS += "{0} {1}, {0}-{1}, {0}k, {0}i, >{0}, ±{0}, {0}.{1}.{1}, {0}..., {0}‰, {0}{1}ab"


@pytest.mark.parametrize("told", PARTS.split(", "))
def test_a_number_that_is_a_part_of_another_is_no_answer(told: str) -> None:
    for frame in ("It is {}.", "We get {} here", r"\boxed{{{}}}", "<answer>{}</answer>", "The answer is {}."):
        completion = frame.format(told.format(42, 7))
        assert [number for number in ("42", "7", "427", "42.7") if right(number, completion)] == []


@pytest.mark.parametrize(
    "one", ["1+", "(1", "2 ", "a", "a+", "√", "1,", "1.", "sqrt(", r"\frac{1}{", "1^", "1 x ", "-", "1 3/"]
)
def test_terms_are_found_in_a_time_that_grows_with_the_text(one: str) -> None:
    start = time.process_time()
    for text in (one * 20_000, one * 20_000 + "!"):
        list(terms(text[:20_000]))
    assert time.process_time() - start < 1.0


@given(st.lists(st.sampled_from(["4", "27", "A", "(B)", "yes", "apples", r"\frac{1}{2}", "=", "and", ":"]), max_size=6))
def test_what_can_be_read_says_every_candidate_of_its_text(parts: list[str]) -> None:
    text = " ".join(parts)
    try:
        found = read(text)
    except Unreadable:
        return
    assert accounts_for(found, text)


def test_candidates_are_digits_letters_of_choices_and_stances() -> None:
    assert candidates(r"A total of 12 \text{ or } (B), yes") == {"1": 1, "2": 1, "B": 1, "yes": 1}
    assert [says_nothing(text) for text in ("apples, as $n$ and $AB$ are", "or $42$", "or 5")] == [True, False, False]
    assert [accounts_for(Scalar("12"), text) for text in ("12 apples", "12 or 3")] == [True, False]
    with pytest.raises(LeftOver):
        read("35 7")
