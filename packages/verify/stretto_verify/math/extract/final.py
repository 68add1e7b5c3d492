r"""Extract the final answer from a completion.

Rule 1 prepares the text. Of the other rules, the first that applies decides:

1. Thoughts, tokens of the chat template and a repeated question are removed. An unfinished thought has no answer.
2. ``<answer>…</answer>``: the last one.
3. ``\boxed{…}``: the last one, with the boxes that a comma, "and" or "or" joins to it. A "Final answer is …" after the
   last box is preferred.
4. "The answer is …", "Answer: …": the last one.
5. The whole text, if it is one formula or a few words.
6. The last formula, tuple or number.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from stretto_verify.math.extract.beside import REFUSED
from stretto_verify.math.extract.boxes import boxed, is_sentence, last_box, only_box
from stretto_verify.math.extract.conditions import unbounded, unconditioned, unrounded
from stretto_verify.math.extract.corrections import corrected, withdrawn
from stretto_verify.math.extract.denials import denied, is_denying, undenied
from stretto_verify.math.extract.glued import further, is_trailed, with_unit
from stretto_verify.math.extract.statements import STATES, concluded, is_reply, reasoned, stance, stated
from stretto_verify.math.extract.terms import in_digits, terms, unquoted
from stretto_verify.math.limits import LONGEST_TAIL
from stretto_verify.math.parse.forms import undeclared
from stretto_verify.math.parse.numerals import counted
from stretto_verify.math.parse.spelling import plain
from stretto_verify.math.parse.structure import candidates, says_nothing
from stretto_verify.math.parse.units import MAGNITUDES, SPOKEN, is_changed, without_unit
from stretto_verify.thoughts import closed, said

Span = tuple[int, int, str]  # start, end, content


@dataclass(frozen=True)
class FinalAnswer:
    """A final answer as written; "" if the text denies each of its candidates. `certain`: the text marks where the
    answer begins and ends."""

    text: str
    certain: bool


_TEMPLATE_END = re.compile(
    r"<\|(?:im_start|im_end|endoftext|eot_id|end|user|assistant)\|?>|<｜|</s>|<eos>|<end_of_turn>"
)
_MIXED = re.compile(r"(?<![0-9.,/])([0-9]{1,9}) and ((?:an?|one|two|three|four|five) [a-z]{4,12})(?![a-z-])")
_TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL | re.IGNORECASE)
_CALCULATED = re.compile(r"<<[^<>\n]{1,80}>>")  # a calculator's notes, as in GSM8K
_NO_ANSWER = re.compile(r"\\(?:boxed|fbox)\s*\{\s*\}|(?<![\w})\]$])~~(?!\s|\\(?:text|q?quad))[^~\n]{1,60}~~")
_DECORATION = re.compile(r"\\(?:textcolor|color)\s*\{[^{}]*\}|</?(?:b|i|u|em|strong|span|mark|code)>")
_BOLD = re.compile(r"(?<![^\s(:\"'=])\*\*(?=[^\s*])([^*\n]{1,200})(?<=\S)\*\*(?=[\s.,;:!?)\"']|$)")  # not a power
_SLANTED = re.compile(
    r"(?<![\w*\\])\*([A-Za-z][A-Za-z :]{0,30})\*(?![\w*])"
    r"|(?<![\w\\{}$^])_{1,2}([A-Za-z][A-Za-z :]{0,30}?|-?[0-9][0-9.,/]*[°%]?)_{1,2}(?!\w)"
)
_FINAL = re.compile(r"final answer(?:[^.\n]{0,100}?)(?:\bis\b|\bare\b|:)\s*:?", re.IGNORECASE)
_ANSWERS = (
    "r[ée]ponse|respuesta|antwort|lösung|resposta|risposta|antwoord|svaret|odpowiedź|odpověď|cevap|jawaban(?:nya)?"
    "|đáp (?:án|số)|ответ|відповідь|الجواب|الإجابة|پاسخ|התשובה|उत्तर"
)
_ARE = "est|es|ist|lautet|é|è|är|(?<=odpowiedź )to|brzmi|je|adalah|là|это|هي|هو|היא"
_ANSWER = re.compile(
    rf"(?:\b(?:ans(?:wer)?|{_ANSWERS}|(?:correct|right) (?:answer|option|choice|one|statement)s?)\b"
    rf"|答案|答え|解答|正解|정답|답)(?:[^.\n$]{{0,100}}?)(?:\b(?:is|are|{_ARE})\b|是|为|は|은|[:=：])\s*:?"
    r"(?:\s*(?:option|choice)\b)?|####|^\s*(?:option|choice)\s*:|\bans\.(?=\s)"
    r"|\b(?:option|choice) is(?=[\s$*]*\([A-J]\))"
    r"|选(?:择|项)?(?:是|为)?[:：]?(?=[\s(（$\\*]*[A-J]{1,4}(?![A-Za-z]))",
    re.IGNORECASE | re.MULTILINE,
)
_CHOICE = r"(?:(?:option|choice)\s+)?\(?(?P<{}>[A-J])\)?"
_HEDGE = r"(?:perhaps|maybe|probably|presumably|surely|clearly|I (?:think|believe|guess)(?: that)?)"
_CHOSEN = re.compile(
    rf"^(?:(?:so|thus|hence|therefore),?\s+)?(?:{_HEDGE},?\s+)?(?:it(?:'s|\s+(?:is|must be|can only be))\s+"
    r"|not\s+\(?[A-J]\)?,?\s+but\s+|\(?[A-J]\)?\s+is\s+(?:wrong|incorrect|false|too\s+\w+)[,;.]\s+(?:so|hence|thus|therefore),?\s+)?"
    rf"(?:{_CHOICE.format('a')}|{_CHOICE.format('b')}\s+is\s+(?:the\s+answer|(?:the\s+)?(?:correct|right)(?:\s+(?:answer|option|choice|one))?)"
    rf"|I(?:(?:\s+would|\s+will|'d|'ll)\s+|\s+)(?:choose|pick|select|go with)\s+{_CHOICE.format('c')})[.!。]?\s*$",
    re.IGNORECASE,
)
_LETTERED = re.compile(r"(?:\([A-J]\)|[A-J][).:])\s*[$\\\w(-]")  # (D) $5$
_FIRST_LETTER = re.compile(r"\(?[A-J]\)?(?![\w'])(?! [a-z]{2})")  # A 42; no sentence that begins with an article
_WRAPPER = re.compile(r"\\(?:text|math)(?:bf|it|rm|sf|tt|normal)?\s*\{\s*([^{}]*)\}")
_SPACE = re.compile(r"\\[ ,;()\[\]]|~|\\q?quad(?![a-z])")
_SENTENCES = re.compile(r"(?<=[.!?])\s+(?![Oo]r\b)|\n(?!\s*[Oo]r\b)")
_STANDS_ALONE = re.compile(
    r"(?<![\w'(/-])\(?[A-HJ]\)?(?![\w'/-])(?!\s+(?!(?:i[st]|isn't|or|and|because|satisfies|works|holds|fits)\b)[a-z]{2})"
)
_NEXT_CHOICE = re.compile(  # another answer behind a choice, unless a sentence begins with it: "B is too small"
    r"[. \t]*(?:\(+[0-9]|[A-J][).:]"
    r"|(?:\([A-J]\)|[A-J](?![\w']))(?!\s+(?!(?:if|when|where|for|or|and|with|vs|not)\b)[a-z]{2}))"
)
_SENTENCE_END = re.compile(r"\n(?!\s*[Oo]r\b)|。|\.(?!\s+[Oo]r\b)(?=\s+[A-Z(]|\s*$)|[.,]?\s*I hope it is correct|<\|")
_FORMULA = re.compile(
    r"(?<!\\)\$\$(?P<a>.{1,2000}?)(?<!\\)\$\$|(?<!\\)\\\[(?P<b>.{1,2000}?)(?<!\\)\\\]"
    r"|(?<!\\)\\\((?P<c>.{1,2000}?)(?<!\\)\\\)"
    r"|(?<![\\0-9$])\$(?P<d>(?:\\\$|[^$\n]){1,2000}?)(?<!\\)\$(?![0-9])",
    re.DOTALL,
)
_BETWEEN = re.compile(
    r"\s*(?:,|;|,?\s*(?:and|or)|\\quad|\\text\{\s*(?:and|or)\s*\}"
    r"|[.,;]?\s*(?:and,?\s)?(?:[Bb]y symmetry|[Ss]imilarly|[Ll]ikewise|[Aa]lso),?(?: also)?)\s*"
)
_SCALE = re.compile(r"\s*(?:\\?%|percent\b|\(?in (base [0-9]{1,2}|binary|octal|hexadecimal)\b\)?)")
_NEAR, _NEXT_LINE = re.compile(r"\s*(?:≈|\\approx)\s*"), re.compile(r"[.,;]?\s*\n\s*(?P<item>[-*•]\s+)?")
_ROOT = re.compile(r"\s*([a-zA-Z])(?:_?\{?[0-9]\}?)?\s*=(?:[^a-zA-Z\\=<>]|\\(?:[dt]?frac|sqrt|pi)(?![a-z]))+")
_NUMBER = re.compile(
    r"(?!(?<=(?m:^)\()[0-9]\) \S)(?<![0-9A-Za-z_^{\\.,])(?<![_^]\{[-−+])(?<![_^][-−+])"
    r"(?:(?:(?<=is )minus|negative)\s+)?[-−+]?(?:\\?\$|[€£¥])?"
    r"(?:[0-9]{1,3}(?:[, ][0-9]{3})+(?:\.[0-9]+)?|[0-9]+(?:[.,][0-9]+)?|\.[0-9]+)"
    rf"(?:\s*/\s*[0-9]+)?(?:[eE][+-]?[0-9]+)?(?:\s*(?:%|°(?![CFK])|(?:percentage points?|per ?cent(?:age)?"
    rf"|{'|'.join(MAGNITUDES)})\b)){{0,2}}(?![0-9])"
)
_TERM = r"(?:[0-9]++(?:\.[0-9]++)?|[√π]|[a-zA-Z](?![a-zA-Z])|\((?:[^()\n]{1,40})\)|\*\*|\^-?)"
_EXPRESSION = rf"[-+−]?{_TERM}(?:[ ]*[-+−*/][ ]*{_TERM}|{_TERM})*+"
_RELATION = re.compile(
    rf"(?<![A-Za-z0-9\\$^_])(?:-?[0-9.]++ ?[<≤]=? ?)?(?:[a-zA-Z] ?[-+*/] ?){{0,3}}[a-zA-Z](?:_?[0-9]|\([a-z]\))?"
    rf"(?:\s*(?:<=|>=|!=|[=<>≤≥≠])\s*{_EXPRESSION})+(?![0-9a-zA-Z%])"
)
_EQUATION = re.compile(  # 2x + 3 = 13: an unknown with a factor, whose letter is not that of a unit
    rf"(?<![A-Za-z0-9\\$^_.])(?=[^=\n]{{0,60}}?[0-9]\*?[abcnp-rt-z](?![A-Za-z0-9])){_EXPRESSION}\s*=\s*{_EXPRESSION}"
    r"(?![0-9a-zA-Z%])"
)
_GROUPING = re.compile(r"(?<=[0-9]),(?=[0-9]{3}(?![0-9]))(?=[0-9,.]*$)")
_DAY = re.compile(r"(?<![0-9/])[0-9]{1,2}/[0-9]{1,2}/[0-9]{4}(?![0-9/])")
_SET = re.compile(r"\\?\{\s*[-+0-9./]+(?:\s*,\s*[-+0-9./]+)+\s*\\?\}")
_PROPORTION = re.compile(r"(?<![0-9.:])[0-9.]{0,12}[0-9](?:(?::| : )[0-9.]{0,12}[0-9])++(?![0-9:])")  # 12:30, 1:2:3
_TUPLE = re.compile(r"(?<![A-Za-z0-9])[(\[]\s*[-+−0-9a-z./^*π√∞\\]+(?:\s*,\s*[-+−0-9a-z./^*π√∞\\]+)+\s*[)\]]")
_COMMA_DECIMAL = re.compile(r"^([-+]?[0-9]+),([0-9]{1,2}|[0-9]{4,})$")  # 2,74 in prose
_ASIDE = re.compile(
    r"不是(?!\s*(?:正[确確])?答案)"
    r"|,\s+which\s(?:is|are|was|were)\s(?=[^.\n]{0,80}\b(?:more|less|fewer|greater|times|twice|half|larger|smaller)\b)"
    rf"|;\s(?=[^;\n]*\b(?:is|are) {REFUSED})"
    r"|,\s+(?:exactly )?as\s(?!well)|,\s+it (?:isn't|is not|can't be|cannot be|doesn't make sense)\s"
    r"|,?\s+\(?(?:not|non|pas|nicht|rather than|instead of|because|since|given that|due to)\s"
)
_BECAUSE = re.compile(r"(?:,? (?:because|since)|, as)\s(?!.*\b(?:so|hence|thus|therefore|but)\b)[^\n]*$")
_IN_SPANISH, _NO_OTHER = re.compile("respuesta", re.IGNORECASE), re.compile(r",\s+no\s+(?=\S)")
_ENDS_OF_RANGE = re.compile(r"\$?,?\s+\(?(in|ex)clusive\b", re.IGNORECASE)  # between 3 and 5 inclusive
_TITLED = re.compile(r"(?P<title>\W*[A-Za-z]{2,}.*)\b(?:is|are|equals)\b[\s:]*(?P<value>\S.*)", re.DOTALL)
_CLAUSE = re.compile(r"\b(?:that|which|who|whose|where|when|what|if)\b[^.,;:]*?\b(?:is|are|be|equals)\b", re.IGNORECASE)
_ARTICLE = re.compile(r"\b(?:the|an?|this|that|its?|my|our|his|her|their|so|hence|thus)\b", re.IGNORECASE)
_OTHER_SCRIPT = re.compile(r"[\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u024f\u0400-\u1fff\u3040-\u9fff\uac00-\ud7af]")
_DOLLAR = re.compile(r"\\(?:textdollar(?![a-zA-Z])\s*(?:\{\})?|\$)(?:\s+(?=[0-9]))?")
_IN_WORDS = re.compile(r"\\text(?:bf|it|rm|sf|tt|normal)?\s*\{([^{}]*)\}")
_WORD_OR_NUMBER = r"(?:(?:a|[A-Za-z]{2,})[.,:]?|-?\\?\$?[0-9][0-9.,/]*(?:\\?%)?)"
_WORDS_AND_NUMBERS = re.compile(rf"{_WORD_OR_NUMBER}(?: {_WORD_OR_NUMBER})*")
_LONGEST_WHOLE, _MOST_ITEMS, _MOST_SPANS = 300, 12, 40  # characters; items of a list; numbers that are looked at
_ITEMS, _NAMES_STANCE = re.compile(r"[,;]|\bor\b|\band\b"), re.compile(r"(?<![\w\\])(?:yes|no|true|false)\b")
_FEW_WORDS = re.compile(r"[A-Za-z'-]+(?:(?: [—–] |[ ,]+)[A-Za-z'-]+){0,5}[.!]?")
_BOUND = re.compile(
    r"(?:at (?:least|most)|no (?:less|more) than|up to|(?:more|greater|larger|less|fewer|smaller) than|over|under)"
    r"\s+(\S.*)",
    re.IGNORECASE,
)
_NOTATION = re.compile(
    r"\\(?:text|mbox|mathrm|operatorname|mathbb|mathcal|mathbf)\s*\{[^{}]*\}"
    r"|\\(?:begin|end)\s*\{[a-zA-Z*]+\}(?:\{[lcr|]*\})?|\\[a-zA-Z]+"
)
_SHORT_WORDS = re.compile(
    r"is|it|of|the|at|to|we|so|if|no|by|an|as|be|do|he|in|me|my|up|us|but|not|for|get|has|was|are|had|his|her|him|its"
    r"|our|out|who|why|how|all|any|can|did|now|own|per|she|too|use|via|yes|you|am|pm|go|oh|ok|let|say|see|two|one"
    r"|six|ten|got|may|new|old|off|put|run|try|yet|few|buy|pay|add|end|way|won|saw|sum"
)
_WHOLE_WORDS = re.compile(
    r"(?<=[0-9)])or(?=[A-Za-z(])"
    r"|(?<![A-Za-z\\])(?:and|or|pi|sqrt|exp|log|ln|sin|cos|tan|arcsin|arccos|arctan|inf|infinity|frac|in|mod|abs|minus|negative|to)(?![A-Za-z])"
)


def without_frame(completion: str, prompt: str = "") -> str:
    """Prepare the end of a completion (20,000 characters): remove thoughts, what follows a token of a chat template,
    and the question where it is repeated (`prompt`, if it has 12 characters or more), and rewrite digits, decorations
    and approximations to plain forms. `prompt` may have opened a thought."""
    if "<<" in completion:
        completion = _CALCULATED.sub("", completion)
    text = _BOLD.sub(r"\1", in_digits(said(completion, prompt)[-LONGEST_TAIL:]))
    text = unquoted(_MIXED.sub(_in_parts, text))
    text = unrounded(unbounded(_DOLLAR.sub(r"\\$", text), prompt))
    if len(question := closed(prompt).strip()) >= 12:
        text = text.replace(question, "\n")
    text = _SLANTED.sub(lambda found: found[1] or found[2], _DECORATION.sub("", _NO_ANSWER.sub("", text)))
    end = _TEMPLATE_END.search(text.lstrip())
    return text.lstrip()[: end.start()] if end is not None and end.start() > 0 else text


def _in_parts(found: re.Match[str]) -> str:
    """``2 and a half`` as ``2 1/2``; unchanged if the words are no fraction."""
    part = counted(found[2])
    return found[0] if part is None or part.denominator == 1 else f"{found[1]} {part}"


def final_answer(text: str, *, is_all: bool = False) -> FinalAnswer | None:
    """Final answer of a text that `without_frame` has prepared: the last ``<answer>`` tag, a correction at the end, the
    last box (or a later "Final answer is"), the last "Answer:", the whole text if it is one formula or a few words, the
    last formula or number; the first of these that is there. None if there is none. `is_all`: the whole text is meant
    as an answer, so parts that the last rule would skip count too."""
    if tagged := [found for found in _TAGGED.findall(text) if found.strip()]:
        return _untagged(unconditioned(tagged[-1].strip()))
    if (piece := corrected(text)) is not None:
        return FinalAnswer(boxed(piece) or piece, certain=True)
    box = boxed(text)
    final = _marked(text, _FINAL, is_all=is_all)
    if box is not None and (final is None or last_box(text) > final[0]):
        return _untagged(box) if is_sentence(box) else FinalAnswer(box, certain=True)
    if (marked := final or _marked(text, _ANSWER, is_all=is_all)) is not None:
        return marked[1]
    if is_list(text) and (is_all or _NAMES_STANCE.search(text)) and not is_reply(text.strip()):
        return FinalAnswer(text.strip(), certain=True)
    return _whole(text.strip()) or _last(unconditioned(text), is_all=is_all)


def in_prose(text: str) -> FinalAnswer | None:
    r"""Final answer in a box that holds words and numbers (``\text{a loss of }\$5``), found as in the text between
    ``<answer>`` tags; None for other contents."""
    told = _MIXED.sub(_in_parts, _DOLLAR.sub(r"\\$", " ".join(_IN_WORDS.sub(r" \1 ", text).split())))
    if r"\text" not in text or _WORDS_AND_NUMBERS.fullmatch(told) is None:
        return None
    found = candidates(told)
    if len(found) > 1 and _ASIDE.search(told) is not None:
        return None  # "41 not 37": a box has one value
    return final_answer(told, is_all=True) if all(map(str.isdigit, found)) else None


def _untagged(inner: str) -> FinalAnswer:
    """The answer in `inner`, the text between ``<answer>`` and ``</answer>``; all of it, if no part can be told."""
    if (content := only_box(inner)) is not None:
        return _untagged(content)
    if (whole := _whole(inner)) is not None:
        return whole
    return final_answer(inner, is_all=True) or FinalAnswer(_told(inner) if "\n" in inner else inner, certain=True)


def _whole(text: str) -> FinalAnswer | None:
    """The answer, if the whole text is one: the letter of a choice, a formula or number with its unit, a spoken number,
    or a few words ("yes", "it is even"); a reason beside it is dropped. None for other texts, and long ones."""
    if not is_short(text):
        return None
    if (taken := reasoned(text)) is not None:
        return FinalAnswer(taken, certain=True)
    if (chosen := _CHOSEN.fullmatch(_ASIDE.split(text)[0])) is not None:
        return FinalAnswer(next(letter for letter in chosen.groups() if letter is not None), certain=True)
    written = plain(text)
    if is_formula(without_unit(undeclared(written.rstrip(".")))[0]) or _is_spoken(text):
        return FinalAnswer(", ".join(line for line in written.split("\n") if line.strip()), certain=True)
    if _FEW_WORDS.fullmatch(text):
        return FinalAnswer(stance(text) or stated(text) or concluded(text), certain=True)
    bare = _BECAUSE.sub("", text)
    return _whole(bare) if bare != text else None


def _is_spoken(text: str) -> bool:
    """Whether the text is a time, a proportion or a bound such as "at least 5"."""
    if (bound := _BOUND.fullmatch(text.rstrip("."))) is not None:
        return is_formula(without_unit(bound[1])[0])
    return any(form.fullmatch(text.rstrip(".")) for form in (SPOKEN, _PROPORTION))


def is_list(text: str) -> bool:
    """Whether the text is a list of formulas and words, such as "blue, 7", not a sentence."""
    items = _ITEMS.split(text.strip())
    return 1 < len(items) <= _MOST_ITEMS and all(_whole(item.strip()) is not None for item in items)


def is_short(text: str) -> bool:
    """Whether the text is short enough to be a final answer as a whole: 1 to 300 characters without an empty line."""
    return 0 < len(text) <= _LONGEST_WHOLE and "\n\n" not in text


def is_formula(text: str) -> bool:
    """Whether the whole text is one formula, without prose."""
    if not is_short(text):
        return False
    inner = list(_FORMULA.finditer(text))
    if inner and inner[0].end() - inner[0].start() == len(text.rstrip(". ")):
        return True
    bare = _WHOLE_WORDS.sub(" ", _NOTATION.sub(" ", text))
    return (
        not inner
        and _OTHER_SCRIPT.search(bare) is None
        and all(_are_symbols(letters) for letters in re.findall(r"[A-Za-z]{2,}", bare))
    )


def _are_symbols(letters: str) -> bool:
    """Whether letters are a product or the name of a line (``abc``, ``AB``), not a word ("Tom")."""
    return len(letters) <= 3 + letters.isupper() - letters.istitle() and _SHORT_WORDS.fullmatch(letters.lower()) is None


# Marked answers (rules 3 and 4).


def _marked(text: str, mark: re.Pattern[str], *, is_all: bool) -> tuple[int, FinalAnswer] | None:
    """The answer behind the last `mark` ("Answer:") that has text behind it and is not denied, with a value that the
    text adds to it (" or 43"), and the index at which the mark begins; None without any. Its text is "" if "not"
    follows the mark without a "but", or the text withdraws the answer. `is_all` as in `final_answer`."""
    for found in reversed(list(mark.finditer(text))):
        rest = re.sub(r'^(?:[\s*_"“:：#]|\\")+', "", text[found.end() :])
        lead = text[max(0, found.start() - 40) : found.end()]
        if not rest.strip() or is_denying(re.split(r"[.,;:!?\n](?=\s)", lead.rstrip(" :："))[-1]):
            continue
        if re.match(r"(?:not|never|I (?:do|can)(?:n't| ?not))\b", rest):
            _, but, rest = _sentence(rest).partition(" but ")
            if not but:
                return found.start(), FinalAnswer("", certain=True)
        rest = _NO_OTHER.sub(", not ", rest.lstrip()) if _IN_SPANISH.search(lead) else rest.lstrip()
        if is_all and not says_nothing(rest[len(_sentence(rest)) :]):
            return found.start(), FinalAnswer(rest, certain=True)
        piece, after = _piece_of(rest), rest[len(_sentence(rest)) :]
        if withdrawn(piece.text, after):
            return found.start(), FinalAnswer("", certain=True)
        other = further(after)
        return found.start(), piece if other is None else FinalAnswer(f"{piece.text}, {other}", piece.certain)
    return None


def _piece_of(rest: str) -> FinalAnswer:
    """The answer in the text after a mark such as "The answer is": the first that applies of a box, a stance and the
    letter of a choice in the first sentence; a lettered choice at its beginning (an empty answer if the next line is
    another one); the formulas at its beginning (the sentence if it says more, an empty answer if it denies them); the
    sentence, if it is one short formula, a spoken number, or has no digit; its last formula or number."""
    if (inner := boxed(_sentence(rest))) is not None:
        return FinalAnswer(inner, certain=True)
    if (said := stance(sentence := _sentence(rest))) is not None:
        return FinalAnswer(said, certain=True)
    told = _told(rest)
    if not _FEW_WORDS.fullmatch(sentence) and (letter := _letter(told)) is not None:
        return letter
    if _LETTERED.match(_bare(rest)) or _FIRST_LETTER.match(_bare(told)):
        behind = rest[len(told) :].lstrip(" .\n").split("\n")[0]
        return FinalAnswer("" if _NEXT_CHOICE.match(_bare(behind)) else told, certain=True)
    if (first := _FORMULA.match(rest)) is not None:
        contents, end = _formulas(rest, first)
        if denied(told, 0, end):
            return FinalAnswer("", certain=True)
        if end >= len(told) or says_nothing(told[end:]):
            return FinalAnswer(", ".join(contents), certain=True)
        return FinalAnswer(told, certain=True)
    if (is_short(told) and is_formula(without_unit(told)[0])) or _is_spoken(told) or not re.search("[0-9]", told):
        return FinalAnswer(told, certain=False)
    return _last(told, is_all=True) or FinalAnswer(told, certain=False)


def _formulas(text: str, first: re.Match[str]) -> tuple[list[str], int]:
    """Contents of the formula `first` and of those that a comma, "and" or the like joins to it, and the index at which
    the last ends. A percent sign or base behind the last is a part of it."""
    contents, at = [_content(first)], first.end()
    while (joint := _BETWEEN.match(text, at)) is not None and (more := _FORMULA.match(text, joint.end())) is not None:
        contents.append(_content(more))
        at = more.end()
    if (unit := _SCALE.match(text, at)) is None:
        return contents, at
    return [*contents[:-1], contents[-1] + (rf"\text{{ in {unit[1]}}}" if unit[1] else "%")], unit.end()


def _content(found: re.Match[str]) -> str:
    return next(group for group in found.groups() if group is not None)


def _sentence(text: str) -> str:
    return _SENTENCE_END.split(text, 1)[0]


def _told(rest: str) -> str:
    """First sentence of a text, without quotation marks, and only up to a reason ("because …") or denial ("not 5")."""
    sentence = unconditioned(_ASIDE.split(_sentence(rest.strip()))[0])
    return re.sub(r"^'([^']*)'$", r"\1", sentence.strip(' "“”*`'))


# Answers without a mark (rule 6).


def _last(text: str, *, is_all: bool) -> FinalAnswer | None:
    """Last formula or number that is not denied, with those joined to it or its unit; an empty answer if all are
    denied. Without any, the letter of a choice, or None. `is_all`: if the text has other candidates besides, return all
    of it, or the answer behind words that announce one ("the sum of 2 and 3 is 5")."""
    spans: list[Span] = [(found.start(), found.end(), _content(found)) for found in _FORMULA.finditer(text)]
    for form in (_RELATION, _EQUATION, _TUPLE, _SET, _DAY):
        spans += _found(form, text, spans)
    formulas = [(start, end) for start, end, _ in spans]
    for form in (SPOKEN, _PROPORTION):
        spans += _found(form, text, spans)
    spans += _apart(terms(text), spans)
    numbers = _found(_NUMBER, text, spans)
    spans += [(start, end, _COMMA_DECIMAL.sub(r"\1.\2", content)) for start, end, content in numbers]
    spans = _approximated(text, sorted(spans) if is_all else sorted(spans)[-_MOST_SPANS:])
    kept = [span for span in undenied(text, spans) if not withdrawn(span[2], text[span[1] :])]
    if not kept:
        return FinalAnswer("", certain=True) if spans else _letter(text)
    joined = _with_neighbours(text, kept)
    if is_trailed(behind := text[joined[0][1] :]) or (is_all and is_changed(behind)):
        return FinalAnswer("" if is_all else text, certain=False)
    if is_all and not says_nothing(_without(text, [*joined, *[span for span in spans if span not in kept]])):
        titled = _TITLED.match(text)
        if titled is not None and _is_title(titled["title"], _LETTERED.match(_bare(titled["value"])) is not None):
            return _piece_of(titled["value"])
        return FinalAnswer(text, certain=False)
    contents = ", ".join(_GROUPING.sub("", content) for _, _, content in reversed(joined))
    if len(joined) == 1 and (measured := with_unit(contents, text[joined[0][1] : joined[0][1] + 60])) != contents:
        return FinalAnswer(measured, certain=True)
    ends = _ENDS_OF_RANGE.match(text, joined[0][1]) if len(joined) == 2 else None
    if ends is not None and text[: joined[1][0]].rstrip(" $").endswith("between"):
        contents = f"[{contents}]" if ends[1].lower() == "in" else f"({contents})"
    return FinalAnswer(contents, certain=kept[0][:2] in formulas)


def _approximated(text: str, spans: Sequence[Span]) -> list[Span]:
    """The spans, in the order of the text; an exact value and its approximation (``1/6 ≈ 0.167``) become one."""
    joined: list[Span] = []
    for start, end, content in spans:
        if joined and _NEAR.fullmatch(text[joined[-1][1] : start]) is not None:
            start, content = (first := joined.pop())[0], rf"{first[2]} \approx {content}"
        joined.append((start, end, content))
    return joined


def _is_title(words: str, of_choice: bool) -> bool:
    """Whether words announce an answer. They may contain numbers ("the sum of $f(2)$ and 3"), but no choices, and no
    verb that states an answer of its own.

    `of_choice`: a choice follows. Then the words may be another answer ("blue is (D) 42"), so they must have an article
    and no candidate but digits.
    """
    bare = _FORMULA.sub(" ", words)
    if "\\" in bare or not all(found.isdigit() for found in candidates(bare)) or is_denying(words):
        return False
    if STATES.search(_CLAUSE.sub(" ", words)) is not None:
        return False
    return not of_choice or (_ARTICLE.search(bare) is not None and all(map(str.isdigit, candidates(words))))


def _bare(text: str) -> str:
    """The text without markup of mathematics and emphasis, and without leading spaces."""
    return _WRAPPER.sub(r"\1", _SPACE.sub(" ", text)).replace("$", "").replace("**", "").lstrip()


def _letter(text: str) -> FinalAnswer | None:
    """Letter of the choice in the last sentence that has one: "so I think it's B, not A". None if no sentence has one,
    that one or a later one has a number or formula, or it has several choices."""
    for sentence in reversed(_SENTENCES.split(text)):
        if re.search(r"[0-9$\\]", sentence):
            return None
        found = [
            place for place in _STANDS_ALONE.finditer(sentence) if not denied(sentence, place.start(), place.end())
        ]
        if found:
            return FinalAnswer(found[0][0], certain=True) if len({place[0] for place in found}) == 1 else None
    return None


def _found(form: re.Pattern[str], text: str, taken: Sequence[Span]) -> list[Span]:
    """Matches of `form` as spans, without those that begin inside a `taken` span."""
    return _apart(((found.start(), found.end(), found[0]) for found in form.finditer(text)), taken)


def _apart(places: Iterable[Span], taken: Sequence[Span]) -> list[Span]:
    return [place for place in places if not any(start <= place[0] < end for start, end, _ in taken)]


def _with_neighbours(text: str, spans: Sequence[Span]) -> list[Span]:
    """The last of the spans and those before it that "and", "or" or a comma joins to it, or that give a value to the
    same name, or in a list, a line before. `spans`, at least one, and the result: from last to first."""
    joined = [spans[0]]
    for span in spans[1:]:
        between = text[span[1] : joined[-1][0]]
        one, other, line = _ROOT.fullmatch(span[2]), _ROOT.fullmatch(joined[-1][2]), _NEXT_LINE.fullmatch(between)
        is_root = one and other and line and (line["item"] or one[1] == other[1])
        if not is_root and _BETWEEN.fullmatch(between) is None:
            break
        joined.append(span)
    return joined


def _without(text: str, spans: Sequence[Span]) -> str:
    for start, end, _ in sorted(spans, reverse=True):
        text = f"{text[:start]} {text[end:]}"
    return text
