r"""Where in a text the final answer stands.

The rules, the first that applies:

1. What a chat template added behind the answer is cut off, and so are a thought that ended (``</think>``) and the
   question, where the model wrote it again.
2. ``<answer>…</answer>``: the last one.
3. ``\boxed{…}``: the last one, with those that a comma, "and" or "or" joins to it. "Final answer is …" behind it counts
   more than the box.
4. "The answer is …", "Answer: …": the last one.
5. The whole text, if it is all mathematics, or a few words.
6. The last formula, tuple or number.

What is denied ("not 42", "42 is wrong") is no answer: the one before it is.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from stretto.rewards.math_limits import LONGEST_TAIL
from stretto.rewards.math_units import without_unit


@dataclass(frozen=True)
class Piece:
    """A final answer as it is written; `certain` where its ends are marked in the text, and are no guess."""

    text: str
    certain: bool


_TEMPLATE_END = re.compile(
    r"<\|(?:im_start|im_end|endoftext|eot_id|end|user|assistant)\|?>|<｜|</s>|<eos>|<end_of_turn>"
)
_TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL | re.IGNORECASE)
_BOX = re.compile(r"\\(?:boxed|fbox|framebox)\s*(?=\{)")
_EMPTY_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{\s*\}")  # "put it into \boxed{}"
_BARE_BOX = re.compile(r"\\(?:boxed|fbox)\s+(-?[0-9.]+|[a-zA-Z])")
_JOINED = re.compile(r"(?<![a-zA-Z])(?:and|or)(?![a-zA-Z])|,|;")
_CORRECTED = re.compile(r"\b(?:wait|actually|instead|rather|correct|sorry|mistake|wrong|hmm|no|not)\b", re.IGNORECASE)
_FINAL = re.compile(r"final answer(?:[^.\n]{0,100}?)(?:\bis\b|\bare\b|:)\s*:?", re.IGNORECASE)
_ANSWER = re.compile(
    r"(?:\banswer|\b(?:correct|right) (?:option|choice))\b(?:[^.\n$]{0,100}?)(?:\bis\b|\bare\b|:|=)\s*:?"
    r"(?:\s*(?:option|choice)\b)?|####",
    re.IGNORECASE,
)
_SENTENCE_END = re.compile(r"\n|\.(?=\s+[A-Z(]|\s*$)|[.,]?\s*I hope it is correct|<\|")
_FORMULA = re.compile(
    r"(?<!\\)\$\$(?P<a>.{1,2000}?)(?<!\\)\$\$|(?<!\\)\\\[(?P<b>.{1,2000}?)(?<!\\)\\\]"
    r"|(?<!\\)\\\((?P<c>.{1,2000}?)(?<!\\)\\\)"
    r"|(?<![\\0-9$])\$(?P<d>(?:\\\$|[^$\n]){1,2000}?)(?<!\\)\$(?![0-9])",
    re.DOTALL,
)
_BETWEEN = re.compile(r"\s*(?:,|;|,?\s*(?:and|or)|\\quad|\\text\{\s*(?:and|or)\s*\})\s*")
_NUMBER = re.compile(
    r"(?<![0-9A-Za-z_^{\\.,])[-−+]?[$€£¥]?(?:[0-9]{1,3}(?:[, ][0-9]{3})+(?:\.[0-9]+)?|[0-9]+(?:[.,][0-9]+)?|\.[0-9]+)"
    r"(?:\s*/\s*[0-9]+)?(?:[eE][+-]?[0-9]+)?(?:\s*(?:%|percent(?:age)?\b))?(?![0-9])"
)
_TUPLE = re.compile(r"(?<![A-Za-z0-9])[(\[]\s*[-+0-9a-z./^*π√∞\\]+(?:\s*,\s*[-+0-9a-z./^*π√∞\\]+)+\s*[)\]]")
_COMMA_DECIMAL = re.compile(r"^([-+]?[0-9]+),([0-9]{1,2}|[0-9]{4,})$")  # 2,74 in prose
_DENIED_BEFORE = re.compile(
    r"(?:\bnot\b|n't\b|\bnever\b|\bneither\b|\bnor\b|\bcannot be\b|\brather than\b|\binstead of\b|\\neq?|≠|!=)"
    r"[^.,;:\n!?0-9$]{0,24}$",
    re.IGNORECASE,
)
_DENIED_AFTER = re.compile(
    r"^[\s$.)}*]{0,3}\s*(?:(?:is|was|are|would be|can)\s*(?:not|n't|wrong|incorrect|false|impossible)\b|isn't|wasn't)",
    re.IGNORECASE,
)
_LABEL = re.compile(r"^(?:[A-Za-z$\\][^=.\n]*?\s)?(?:is|are|equals|be)\s*:?\s+(?=\S)")
_LONGEST_WHOLE = 300
_FEW_WORDS = re.compile(r"[A-Za-z'-]+(?:[ ,]+[A-Za-z'-]+){0,5}[.!]?")
_WHOLE_WORDS = re.compile(
    r"(?<=[0-9)])or(?=[A-Za-z(])|(?<![A-Za-z\\])(?:and|or|pi|sqrt|exp|log|ln|sin|cos|tan|arcsin|arccos|arctan|inf|infinity|frac|in|mod|abs)(?![A-Za-z])"
)


def without_frame(completion: str, prompt: str = "") -> str:
    """Rule 1."""
    text = completion[-LONGEST_TAIL:]
    if len(question := prompt.strip()) >= 12:
        text = text.replace(question, "\n")
    text = _EMPTY_BOX.sub("", text)
    head, found, tail = text.rpartition("</think>")
    if found and _TEMPLATE_END.sub("", tail).strip():
        text = tail
    elif found:
        text = head
    end = _TEMPLATE_END.search(text.lstrip())
    return text.lstrip()[: end.start()] if end is not None and end.start() > 0 else text


def final_answer(text: str) -> Piece | None:
    """The final answer of a text without frame, or None where there is none."""
    if tagged := [found for found in _TAGGED.findall(text) if found.strip()]:
        inner = tagged[-1]
        return boxed(inner) or Piece(_told(inner) if "\n" in inner.strip() else inner.strip(), certain=True)
    box = boxed(text)
    final = _marked(text, _FINAL)
    if box is not None and (final is None or _last_box(text) > final[0]):
        return box
    marked = final or _marked(text, _ANSWER)
    if marked is not None:
        return marked[1]
    whole = text.strip()
    if is_short(whole) and (is_formula(without_unit(whole.rstrip("."))[0]) or _FEW_WORDS.fullmatch(whole)):
        return Piece(whole, certain=True)
    return _last(text)


def is_short(text: str) -> bool:
    """Can a whole text be a final answer?"""
    return 0 < len(text) <= _LONGEST_WHOLE and "\n\n" not in text


def is_formula(text: str) -> bool:
    """Is a whole text one formula, without prose around it?"""
    if not is_short(text):
        return False
    inner = list(_FORMULA.finditer(text))
    if inner and inner[0].end() - inner[0].start() == len(text.rstrip(". ")):
        return True
    bare = re.sub(r"\\(?:text|mbox|mathrm|operatorname)\s*\{[^{}]*\}|\\[a-zA-Z]+", " ", text)
    bare = _WHOLE_WORDS.sub(" ", bare)
    return not inner and re.search(r"[A-Za-z]{2,}", bare) is None


# Boxes.


def boxed(text: str) -> Piece | None:
    r"""The last box with content, and those that belong to one list with it.

    >>> boxed(r"first \boxed{3}, and then \boxed{4} and \boxed{5}.")
    Piece(text='3,4,5', certain=True)
    """
    found = [box for box in _boxes(text) if box[2].strip()]
    if not found:
        bare = _BARE_BOX.findall(text)
        return Piece(bare[-1], certain=True) if bare else None
    kept = [found[-1]]
    for box in reversed(found[:-1]):
        if not _belong_together(text[box[1] : kept[0][0]]):
            break
        kept.insert(0, box)
    contents = [content.strip().replace("$", "") for _, _, content in kept]
    distinct = [content for at, content in enumerate(contents) if content not in contents[:at]]
    return Piece(",".join(distinct), certain=True)


def _boxes(text: str) -> Iterator[tuple[int, int, str]]:
    """Start, end and content of each outermost box; one that is never closed goes to the end of its line."""
    at = 0
    while (found := _BOX.search(text, at)) is not None:
        end = _brace_end(text, found.end())
        if end < 0:
            line = text[found.end() + 1 :].split("\n")[0]
            if not _BOX.search(line):
                yield found.start(), len(text), line.rstrip("$. ")
            return
        yield found.start(), end + 1, text[found.end() + 1 : end]
        at = end + 1


def _brace_end(text: str, start: int) -> int:
    level = 0
    for at in range(start, len(text)):
        if text[at] == "{" and text[at - 1] != "\\":
            level += 1
        elif text[at] == "}" and text[at - 1] != "\\":
            level -= 1
            if level == 0:
                return at
    return -1


def _belong_together(between: str) -> bool:
    if _CORRECTED.search(between):
        return False
    return len(between) < 10 or (len(between) < 70 and _JOINED.search(between) is not None)


def _last_box(text: str) -> int:
    return max(found.start() for found in re.finditer(r"\\(?:boxed|fbox|framebox)", text))


# Marked answers.


def _marked(text: str, mark: re.Pattern[str]) -> tuple[int, Piece] | None:
    """The last marked answer that is not denied, and where it begins."""
    for found in reversed(list(mark.finditer(text))):
        rest = re.sub(r'^(?:[\s*_"“:]|\\")+', "", text[found.end() :])
        if not rest.strip() or re.search(r"\bnot\b|n't\b", found[0]):
            continue
        if re.match(r"(?:not|never)\b", rest):
            _, but, rest = _sentence(rest).partition(" but ")
            if not but:
                return found.start(), Piece("", certain=True)
        return found.start(), _piece_of(rest.lstrip())
    return None


def _piece_of(rest: str) -> Piece:
    """The formulas at the beginning, or what the sentence says."""
    if (inner := boxed(_sentence(rest))) is not None:
        return inner
    first = _FORMULA.match(rest)
    if first is not None:
        return Piece(",".join(_formulas(rest, first)), certain=True)
    told = _told(rest)
    if (is_short(told) and is_formula(without_unit(told)[0])) or not re.search("[0-9]", told):
        return Piece(told, certain=False)
    return _last(told) or Piece(told, certain=False)


def _formulas(text: str, first: re.Match[str]) -> list[str]:
    contents, at = [_content(first)], first.end()
    while (joint := _BETWEEN.match(text, at)) is not None and (more := _FORMULA.match(text, joint.end())) is not None:
        contents.append(_content(more))
        at = more.end()
    unit = re.match(r"\s*\\?%|\s*percent\b", text[at:])
    return [*contents[:-1], contents[-1] + ("%" if unit else "")]


def _content(found: re.Match[str]) -> str:
    return next(group for group in found.groups() if group is not None)


def _sentence(text: str) -> str:
    end = _SENTENCE_END.search(text)
    return text[: end.start()] if end is not None else text


def _told(rest: str) -> str:
    """The sentence, without the words that introduce its value, and without what it denies."""
    sentence = re.split(r",?\s+(?:not|rather than|instead of)\s", _sentence(rest.strip()))[0]
    label = _LABEL.match(sentence)
    return (sentence[label.end() :] if label is not None else sentence).strip(' "“”*`')


# No mark at all.


def _last(text: str) -> Piece | None:
    """The last formula or number that is not denied; an empty piece where all are."""
    spans = [(found.start(), found.end(), _content(found)) for found in _FORMULA.finditer(text)]
    spans += [
        (found.start(), found.end(), found[0])
        for found in _TUPLE.finditer(text)
        if not any(start <= found.start() < end for start, end, _ in spans)
    ]
    formulas = [(start, end) for start, end, _ in spans]
    spans += [
        (found.start(), found.end(), _COMMA_DECIMAL.sub(r"\1.\2", found[0]))
        for found in _NUMBER.finditer(text)
        if not any(start <= found.start() < end for start, end in formulas)
    ]
    denied = False
    for position, (start, end, content) in enumerate(ordered := sorted(spans, reverse=True)):
        if _DENIED_BEFORE.search(text[max(0, start - 60) : start]) or _DENIED_AFTER.search(text[end : end + 40]):
            denied = True
            continue
        return Piece(_with_neighbours(text, ordered[position:], content), certain=(start, end) in formulas)
    return Piece("", certain=True) if denied else None


def _with_neighbours(text: str, spans: list[tuple[int, int, str]], content: str) -> str:
    """The last formula, after those that "and", "or" or a comma joins to it."""
    contents = [content]
    for (start, _, _), (_, end, before) in pairwise(spans):
        if _BETWEEN.fullmatch(text[end:start]) is None:
            break
        contents.insert(0, before)
    return ",".join(contents)
