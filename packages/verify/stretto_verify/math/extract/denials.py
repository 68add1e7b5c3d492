"""Denials in prose: "not 42", "42 is wrong", "more than 42", "twice 42"; and abroad, "no es 42", "42 ではない".

A reading may pass over words, but not over one that denies. Words of denial are few in each language, and stand close
to what they deny: before it ("no es 42") or behind it ("42 değil").
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from stretto_verify.math.extract.beside import (
    FALSE,
    REFUSED,
    is_bounded,
    is_changed_before,
    is_changed_behind,
)
from stretto_verify.math.parse.measures import unit_named
from stretto_verify.math.parse.units import MAGNITUDES, NUMBER_WORD

_TURN = (  # words that end the scope of a denial
    r"\b(?:but|so|hence|thus|therefore|then|giving|which gives|sino|pero|y|mais|donc|et|sondern|aber|also|und"
    r"|quindi|mas|maar|utan|men|ale|lecz|ama|tetapi|melainkan|mà|hanem|vaan|но|а|и|поэтому|значит|αλλά|بل|אלא)\b"
)
#: Words of languages with Latin letters; those that mean something else in English stand with a verb.
_FOREIGN = (
    r"non|pas|jamais|nicht|kein(?:e[nrms]?)?|keinesfalls|keineswegs|niemals|no (?:es|son|era|fue|ser[íi]a?|puede ser"
    r"|vale)|nunca|tampoco|não|niet|geen|nooit|inte|aldrig|ikke|aldri|nie|není|nejsou|nikdy|nu (?:este|e|sunt)|nem"
    r"|ei ole|bukan(?:lah)?|tidak|không"
)
_ATTRIBUTED = (  # one may think that the answer is 42; "we may conclude" is no guess
    r"(?:may|might|could) (?:think|guess|expect|believe)\b|(?<!\bwe )(?:may|might|could) (?:say|conclude|answer)\b"
    r"|(?:every(?:one|body)|some(?:one|body)|(?:many |most |some |other )?(?:people|students)|many|most|some|others)"
    r" (?:think|guess|say|expect|believe|conclude|answer|claim)e?s?\b"
    r"|(?:common|popular|naive|tempting|initial) (?:guess|answer|mistake|error)\b"
    r"|(?:suppose|assum(?:e|ing)|if (?:[a-z]+ ){1,3}were)\b"
)
_DENIED_BEFORE = re.compile(
    r"(?:\b(?:(?:not|non|pas|nicht)\b(?!-)|never\b|neither\b|nor\b|cannot (?:be|equal|get|reach|obtain)\b|rather than\b"
    r"|instead of\b|by no means\b|no way\b|(?<!no )doubt\b|impossible\b|unlikely\b|hardly\b|(?:any|every)thing but\b"
    r"|nothing like\b|except\b|other than\b|far from\b|(?:false|wrong|incorrect) (?:that|to)\b|nobody\b|no one\b"
    rf"|(?:{_FOREIGN})\b(?!-)|{_ATTRIBUTED})|n't\b|\\neq?|≠|!=)(?:(?!{_TURN})[^.,;:\n!?0-9$]){{0,24}}\$?$"
)
_DENIED_BEFORE_ELSEWHERE = re.compile(  # in other scripts
    r"(?:\b(?:не|ни|ні|није|никогда|ніколи|нельзя|δεν|όχι|ليس|ليست|لا|ليسا|לא|אינ[הו]|איננ[הו])\b|ไม่)"
    rf"(?:(?!{_TURN})[^.,;:\n!?0-9$،؛]){{0,24}}\$?$"
    r"|(?:不(?:可能|应该?|應該?|会|會|能|再|会?应该?)?(?:是|为|為|等于|等於|得|选|選|对|對)|[并並绝絕而]?非|≠|小[于於]|大[于於]|超[过過]|不到|不足|少[于於]|多[于於]|(?:至少|至多)[有是]?|[高低][于於])[\s(（$\\*{“「\"'択择擇项項:：]{0,6}$"
)
_NO = re.compile(r"^\W*no\s+[$(*]{0,3}$")  # "no 42"; "no, 42" is a correction
_COMPARED_ABROAD = re.compile(
    r"\b(?:(?:moins|plus) d[e']|(?:weniger|[a-zäöüß]*(?:er|mehr)) als|(?:más|menos|mais) d[eo]|(?:più|meno) di"
    r"|(?:mayor|menor|maior|superior|inferior)(?: o igual)? (?:que|a|do que)|(?:maggiore|minore) di|(?:meer|minder) dan"
    r"|(?:mer|mindre) än|(?:mere|mindre) end|(?:więcej|mniej) niż|(?:больше|меньше|более|менее)(?: чем)?)\s*[$(*]{0,3}$"
)
_DATED = re.compile(r"\b(?:before|after|until)\s*$")
_LABELLED = re.compile(  # "This is not the final answer: 42"
    r"(?:\b(?:not|never|wrong|false|incorrect)"
    r"|n't)\b[^.,;:\n!?0-9$]{0,30}\banswer\b[^.,;:\n!?0-9$]{0,10}[:：]\s*[$(*]{0,3}$"
    rf"|\b{FALSE}(?: (?:[a-z]+ )?(?:answer|guess|result|value|solution|conclusion|choice|option|total)\b"
    r"[^.,;:\n!?0-9$]{0,20})?(?:\b(?:is|was|be|gives)|[:：=])\s*[$(*]{0,3}$"
)
_BESIDE = re.compile(  # the answer is another number, described by this one
    r"\b(?:(?:more|less|fewer|greater|larger|bigger|higher|smaller|lower|older|younger|longer"
    r"|shorter) than(?: or equal to)?|exceed(?:s|ing)?|as [a-z]+ as|(?:(?:reject|avoid|discard|eliminate|exclude)(?:s"
    r"|e?d)?|rul(?:e|ed|es|ing) out)(?: (?:the )?(?:answer|value|option|choice|solution|root))?|without|exclud(?:e[sd]?"
    r"|ing)|differ(?:s|ent)? from|unequal to|menos|moins|минус|below|above|over|under|short of|beyond|close to|nearly"
    r"|almost|(?:subtract|deduct)(?:s|ed|ing)? [^.,;\n]{1,12} from|twice|double|triple|half(?: of)?|thrice"
    r"|divisible by|(?:square|cube|square root|cube root|root|sqrt"
    r"|opposite|reciprocal|negative|inverse|double|half|multiple"
    r"|log|logarithm|ln|sine?|cosine|tangent|factorial|floor|ceiling|derivative|integral|absolute value"
    r"|third|quarter|fifth|tenth|digits?|divisors?|factors?|power|the remainder) of)\s*[$(*{\\]{0,3}\s*$"
)
_OPEN = r"(?:or|and) (?:more|less|greater|fewer|larger|smaller|bigger|higher|lower|above|below|beyond|up|over)"
_OPEN_BEHIND = re.compile(rf"{_OPEN}\W*$", re.IGNORECASE)
_DENIED_AFTER = re.compile(
    rf"^[\s$.)}}*]{{0,3}}\s*(?:(?:(?:[^\w\s\\]|\\[a-z]+)\s*)+(?:(?:this|that|it)(?:'s| is) )?{FALSE}(?=[\W]*(?:$|\n))"
    r"|\((?:wrong|incorrect|false|rejected|extraneous)\b|isn't|wasn't|\?\s*(?:no|nope|never|wrong)\b"
    r"|(?:is|was|are|would be|can)\s*(?:not|n't|too|no answer|close"
    rf"|(?:my|our|the|an?) (?:first )?(?:guess|candidate)|{FALSE})\b"
    r"|(?:does|do|did|would|could|must|can|may)(?:n't|\s+not|\s+fail)\b|fails?\b"
    r"|(?:,?\s*(?:but (?:that|this|it|which)(?: [a-z]+)?|which)\s)?"
    rf"(?:is|was|seems|(?:must|has to|should|can|would) be) (?:not\b|{REFUSED})"
    r"|\?\s*not\b"
    rf"|\s(?:squared|cubed|doubled|halved|tripled|twice|factorial|less (?:one|[0-9]+)|(?:more|less) than [0-9]+"
    rf"|(?:or|plus|minus|times) {NUMBER_WORD}|at (?:least|most)|{_OPEN}|or so|or (?:maybe |perhaps )?not)\b)",
    re.IGNORECASE,
)
_PARTS = "half|third|fourth|fifth|sixth|seventh|eighth|ninth|tenth|hundredth|thousandth"
_ANOTHER_BEHIND = re.compile(  # 42 halves, the 42nd, the 42nd prime, 42 degrees below zero
    r"\s?(?:st|nd|rd|th)\}*\$?\s+(?:[a-z]+\s+)?(?:primes?|powers?|roots?|multiple|square|cube|composite|fibonacci|triangular)\b"
    rf"|\$?\s(?:halves|(?:{_PARTS})s\b|(?:[a-z]+\s){{0,2}}below\s(?:sea level|ground))"
    r"|\$?\stoo\s[a-z]|\$?\s(?:off|less|fewer|lower|short|score|below|above|under|over)[\s.!]*$",
    re.IGNORECASE,
)
_ORDINAL = re.compile(r"[$*]{0,3}-?(?:st|nd|rd|th)\b(?:\s(?:one|place))?[\s.!,;]*$")  # the 42nd
_CONTINUED = re.compile(rf"\s(?:and\s)?{NUMBER_WORD}", re.IGNORECASE)  # 5 thousand and one
#: "42 no es …", "42 ist falsch", "42 değil"
_DENIED_AFTER_ELSEWHERE = re.compile(
    r"^[\s$.)}*\"”」]{0,3}\s*(?:(?:ist|es|est|é|è|är|er|je|jest|este|to|là|adalah)\s+(?:nicht|kein\w*|falsch|no|non|não"
    r"|niet|inte|ikke|nie|fals[oaeă]?\b|incorrect\w*|faux|fausse|errad[oa]|errat[oa]|sbagliat[oa]|fel\b|forkert|feil"
    r"|fout|onjuist|błędn\w*|špatn\w*|yanlış|salah|sai\b|greșit\w*)|(?:no|non|não|nu|nem|ei|n'est|is niet|není|nie jest"
    r"|bukan|không)\s+(?:es|son|è|é|este|ole|pas|la|phải)\b|není\b|nem\b|değil|yanlış|bukan\b"
    r"|[—–-]?\s*(?:это\s+)?(?:не\b|неверн|неправильн|ошибочн|ні\b|невірн)|نیست|ليس|خطأ|غلط|नहीं|गलत|לא\b|שגוי"
    r"|(?:は|が)?\s*(?:では|じゃ|で)(?:ない|ありません|なく)|(?:は|が)\s*(?:間違|誤り|違|不正解)|とは?異なる|以外|(?:가|이|은|는)?\s*(?:아니|아닙|아님|아닌|틀[렸린])"
    r"|[是这這个個答案，,\s]{0,6}(?:不是|不对|不對|不正[确確]|不成立|不符|[错錯]|并不|並不|以外|除外|是不)|\s?(?:以[上下内內]|未満|未满|倍|的(?:一半|平方|立方|[^，。]{0,3}倍)))",
    re.IGNORECASE,
)
_DENYING_ELSEWHERE = re.compile(
    rf"\b(?:{_FOREIGN})\b|\b(?:не|ни|ні|није|δεν|όχι|ليس|ليست|לא|אינ[הו])\b|नहीं"
    r"|(?:不(?:可能|应该?|應該?|会|會|能)?(?:是|为|為|等于|等於|选|選)|[并並绝絕]非|至[少多]是?)[择擇项項:：\s]{0,3}$",
    re.IGNORECASE,
)
_DENYING = re.compile(
    rf"\b(?:(?:not|never|doubt|impossible|unlikely|wrong|incorrect|false)\b|{_ATTRIBUTED})|n't\b", re.IGNORECASE
)
_ATTRIBUTE = re.compile(  # the 42 rule; "the 42 rules" are counted
    r"[ ](?!(?:people|m[ea]n|women|children|feet|fish|sheep|dice|data|per ?cent)\b)([a-z]+(?<!s)(?<!est))[\s.!}]*$"
)
_NUMBERED = re.compile(r"\b(?:step|problem|exercise|theorem|lemma|rule|equation|section) $")
_NOR = re.compile(r"\s*\$?,?\s*(?:or|nor)\s+\$?")
_AND, _OF_BEFORE = re.compile(r"\s*\$?,?\s*(?:and\s+)?\$?"), re.compile(r"\bof\s*\$?$")
_SEEN = 60, 80  # characters before and after that are searched


def denied(text: str, start: int, end: int) -> bool:
    """Whether the text denies that its part from `start` to `end` is the answer, or only uses it to describe another
    number."""
    before, content = text[max(0, start - _SEEN[0]) : start].lower(), text[start:end]
    if not content.isdigit() and re.search("[A-Za-z:]", content) and _DATED.search(before) is not None:
        return True
    after = text[end : end + _SEEN[1]]
    is_operand = is_changed_behind(text[end - 1 : end + _SEEN[1]] if content.endswith("$") else after)
    is_operand = is_operand or _is_attribute(content, before, after)
    is_boxed = content.startswith("\\")
    return _denied_before(before, is_boxed=is_boxed) or is_operand or _denied_behind(content, after)


def undenied(text: str, spans: Iterable[tuple[int, int, str]]) -> list[tuple[int, int, str]]:
    """The spans (start, end, content) that the text does not deny (see `denied`), last one first. `spans`: in the order
    of the text. "Not 41 or 43" denies both numbers, and so does "the product of 41 and 43"."""
    kept, at, is_denied, is_operand = list[tuple[int, int, str]](), 0, False, False
    for start, end, content in spans:
        is_joined = is_denied and (
            _NOR.fullmatch(text[at:start]) is not None or (is_operand and _AND.fullmatch(text[at:start]) is not None)
        )
        is_operand = is_joined or _OF_BEFORE.search(text, max(0, start - 8), start) is not None
        at, is_denied = end, is_joined or denied(text, start, end)
        if not is_denied:
            kept.insert(0, (start, end, content))
    return kept


def _denied_before(before: str, *, is_boxed: bool) -> bool:
    if not before.isascii() and _DENIED_BEFORE_ELSEWHERE.search(before) is not None:
        return True
    if any(form.search(before) for form in (_DENIED_BEFORE, _LABELLED, _BESIDE, _COMPARED_ABROAD)):
        return True
    if is_changed_before(before) or (not is_boxed and is_bounded(before)):
        return True
    return len(before) < _SEEN[0] and _NO.match(before) is not None


def _denied_behind(content: str, after: str) -> bool:
    if content.strip("$}").removeprefix(r"\boxed{").isdigit() and _ORDINAL.match(after) is not None:
        return True
    if any(form.match(after) for form in (_DENIED_AFTER, _ANOTHER_BEHIND, _DENIED_AFTER_ELSEWHERE)):
        return True
    return content[-1:].isalpha() and _CONTINUED.match(after) is not None


def _is_attribute(number: str, before: str, after: str) -> bool:
    """Whether a number only tells which thing is meant: "the 42 rule", "Rule 42 applies"."""
    if _NUMBERED.search(before) is not None and after.strip(" .!*}$"):
        return True
    is_alone = number.isdigit() and number != "1" and f" {before}".endswith((" the ", " a "))
    found = _ATTRIBUTE.match(after) if is_alone else None
    return found is not None and not unit_named(found[1]) and found[1] not in MAGNITUDES


def is_open(answer: str) -> bool:
    """Whether an answer ends with words by which it is a range with an open end: "42 or more"."""
    return _OPEN_BEHIND.search(answer) is not None


def is_denying(words: str) -> bool:
    """Whether the words that introduce an answer deny it: "the answer is not", "I doubt that the answer is"."""
    return _DENYING.search(words) is not None or _DENYING_ELSEWHERE.search(words) is not None
