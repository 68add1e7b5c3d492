"""Questions before the run: those whose gold answers the reward cannot read are left out, the others are encoded to
token ids. Every question that cannot be encoded is reported with file and line."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import msgspec

from stretto.core.errors import DataError, Problem, several
from stretto.core.machine import cores
from stretto.core.records import Outcome, Prompt
from stretto.model.hf.tokenizer import Tokenizer, not_in_vocabulary
from stretto.rewards.built_in import BUILT_IN
from stretto.rewards.config import RewardsConfig
from stretto.rewards.service.pool import DIED, TIMED_OUT, RewardPool
from stretto.rewards.service.wire import ScoreItem
from stretto.rollout.questions import Question, Questions
from stretto.trainer.messages import Demonstration
from stretto_verify.thoughts import opened

_SHOWN, _SHOWN_PLACES = 20, 3  # most problems in one message, and further places in one problem
_PORTION = 64  # number of gold answers that a worker reads within one deadline
_READING_SECONDS = 60.0  # far more than any readable gold answer takes


@dataclass(frozen=True)
class Sifted:
    """Result of `sift`: the questions whose gold answers can be read. `unreadable`: a problem for each other one."""

    questions: Questions
    unreadable: tuple[Problem, ...] = ()

    @property
    def warnings(self) -> list[str]:
        """Warnings; empty if no question is left out. The first has the number of questions that are left out. Each
        further one names a question, with file and line, and says why; at most twenty are named."""
        if not self.unreadable:
            return []
        count = len(self.unreadable)
        shown = [str(problem) for problem in self.unreadable[:_SHOWN]]
        return [f"{several(count, 'question is', 'questions are')} left out: their gold answers cannot be read", *shown]


def sift(config: RewardsConfig, questions: Questions, reading_seconds: float = _READING_SECONDS) -> Sifted:
    """Leave out questions whose gold answers the reward cannot read. Only built-in rewards that parse gold answers
    (`BUILT_IN`'s `gold`) are checked; with other rewards all questions are kept.

    Reward workers, started for this, read each gold answer once. A gold answer that takes longer than `reading_seconds`
    is an error: if its question were left out, the result would depend on the machine's speed.

    Raises:
        DataError: no gold answer of the training questions, or of the held-out ones, can be read; or one takes longer
            than `reading_seconds`, or ends the worker that reads it.
        RoleError: the workers do not start, for lack of memory or file descriptors, or of time.
    """
    asked = (*questions.training, *questions.held_out)
    reasons: dict[tuple[str, str], str] = {}  # by source and gold answer
    for part in config.parts:
        if part.function in BUILT_IN and (reader := BUILT_IN[part.function].gold):
            judged = [question for question in asked if not part.sources or question.source in part.sources]
            read = config.alone(part).model_copy(update={"function": reader})
            unread = _reasons(read, sorted({question.answer for question in judged}), reading_seconds)
            reasons |= {_key(question): unread[question.answer] for question in judged if question.answer in unread}
    if not reasons:
        return Sifted(questions)
    bad = [question for question in asked if _key(question) in reasons]
    problems = tuple(Problem(place_of(question), reasons[_key(question)]) for question in bad)
    if late := [problem for problem in problems if problem.found.startswith((TIMED_OUT, DIED))]:
        remedy = "shorten or remove these gold answers"
        raise DataError([Problem(problem.place, f"reading it: {problem.found}", remedy) for problem in late[:_SHOWN]])
    kept = replace(
        questions,
        training=[question for question in questions.training if _key(question) not in reasons],
        held_out=[question for question in questions.held_out if _key(question) not in reasons],
    )
    if not kept.training or (questions.held_out and not kept.held_out):
        which = "of the questions for training" if not kept.training else "that is held out"
        found = f"no gold answer {which} can be read by the reward {config.title!r}"
        raise DataError([*problems[:_SHOWN], Problem("[task]", found, f"{len(problems):,} cannot in all")])
    return Sifted(kept, problems)


def _key(question: Question) -> tuple[str, str]:
    """Return (source, gold answer): which rewards read it depends on the source."""
    return question.source, question.answer


def _reasons(config: RewardsConfig, golds: Sequence[str], seconds: float) -> dict[str, str]:
    """Return why a gold answer cannot be read within `seconds`, by gold answer; readable ones are left out.

    `config`: a reward whose function reads gold answers; its verdict on one that it cannot read is undecided. Raises
    RoleError if the workers do not start.
    """
    return asyncio.run(_unreadable(config, golds, seconds)) if golds else {}


async def _unreadable(config: RewardsConfig, golds: Sequence[str], seconds: float) -> dict[str, str]:
    """Return why a gold answer cannot be read within `seconds`, by gold answer, as workers started for this find;
    readable ones are left out. Raises RoleError if the workers do not start."""
    workers = max(config.workers, min(cores(), len(golds) // _PORTION))
    patient = {
        "max_consecutive_undecided": len(golds) + 1,
        "timeout": seconds,
        "workers": workers,
        # The deadline of a portion allows for its slowest gold answers.
        "patience": max(config.patience, 2 * _PORTION * seconds),
    }
    reasons: dict[str, str] = {}
    async with RewardPool(config.model_copy(update=patient)) as pool:
        for at in range(0, len(golds), _PORTION * workers):
            portion = golds[at : at + _PORTION * workers]
            verdicts = await pool.score([ScoreItem(prompt="", completion="", answer=gold) for gold in portion])
            pairs = zip(portion, verdicts, strict=True)
            reasons |= {gold: verdict.reason for gold, verdict in pairs if verdict.outcome is Outcome.UNDECIDED}
    return reasons


_LAST = 64  # number of last tokens of a prompt that are searched for an opening mark of reasoning


def encode_prompts(questions: Iterable[Question], tokenizer: Tokenizer, longest: int) -> tuple[Prompt, ...]:
    """Encode the prompts of questions, in their order; chats are rendered by the chat template. `longest`: most tokens
    of a prompt.

    Raises:
        DataError: a prompt is empty or has more than `longest` tokens; names every such question. Or it has characters
            that the tokenizer does not know; names all of them, and some such questions.
        ModelFolderError: there are chats, and the tokenizer has no chat template.
    """
    prompts: list[Prompt] = []
    problems: list[Problem] = []
    unknown = _Unknown(tokenizer)
    for question in questions:
        try:
            text = _shown(question, tokenizer)
        except DataError as error:  # the chat template refuses it
            problems += (Problem(place_of(question), problem.found, problem.remedy) for problem in error.problems)
            continue
        try:
            ids = tokenizer.encode_rendered(text) if text is not None else tokenizer.encode(question.text)
        except DataError as error:
            unknown.add(question, question.text if text is None else tokenizer.read_rendered(text), error)
            continue
        if 0 < len(ids) <= longest:
            opens = opened(tokenizer.spell(ids[-_LAST:]))
            prompts.append(Prompt(question.id, ids, question.text, question.answer, opens))
            continue
        remedy = f"at most {longest} fit (the context, or the engine's KV cache, less sampling.max_tokens)"
        problem = Problem(place_of(question), f"a prompt of {len(ids)} tokens", remedy if ids else "1 is needed")
        problems.append(problem)
    refuse([*unknown.problems(), *problems])
    return tuple(prompts)


class _Unknown:
    """Texts of questions with characters that the tokenizer does not know, for one message."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._found, self._places, self._characters = "", list[str](), set[str]()

    def add(self, question: Question, text: str, error: DataError) -> None:
        """Add a text of `question`, and the error of its encoding."""
        self._found = self._found or error.problems[0].found
        self._places.append(place_of(question))
        self._characters |= self._tokenizer.unknown_in(text)

    def problems(self) -> list[Problem]:
        """One problem: the first question, the places of some others, all of the characters. Empty without texts."""
        first, *others = list(dict.fromkeys(self._places)) or [""]
        if not first:
            return []
        shown = ", ".join(others[:_SHOWN_PLACES])
        more = f" and {len(others) - _SHOWN_PLACES:,} more" if len(others) > _SHOWN_PLACES else ""
        found = self._found + (f", nor can {shown}{more}" if others else "")
        return [Problem(first, found, not_in_vocabulary(self._characters))]


@dataclass(frozen=True)
class Within:
    """Questions and their encoded prompts, in the same order, none longer than a limit. `note`: a warning if prompts
    were left out or truncated for the limit; else empty."""

    questions: tuple[Question, ...]
    prompts: tuple[Prompt, ...]
    note: str = ""


def encode_within(
    questions: Sequence[Question],
    tokenizer: Tokenizer,
    longest: int,
    long_prompts: Literal["drop", "truncate"],
    which: str,
) -> Within:
    """Encode the prompts of questions, and leave out or truncate those with more than `longest` tokens.

    Args:
        long_prompts: "drop": leave out long prompts; "truncate": cut off their first tokens.
        which: words that name the questions in the note, such as "held out".

    Raises:
        DataError: a prompt is empty, or has characters that the tokenizer does not know (names every such question);
            or all prompts are dropped.
        ModelFolderError: there are chats, and the tokenizer has no chat template.
    """
    whole = encode_prompts(questions, tokenizer, sys.maxsize)
    long = [prompt.id for prompt in whole if len(prompt.token_ids) > longest]
    if not long:
        return Within(tuple(questions), whole)
    first = place_of(next(question for question in questions if question.id == long[0]))
    found = f"{len(long):,} of {several(len(whole), 'prompt')} ({which}) are longer than {several(longest, 'token')}"
    note = f"{found}; the first is {first}: "
    if long_prompts == "truncate":
        cut = tuple(msgspec.structs.replace(prompt, token_ids=prompt.token_ids[-longest:]) for prompt in whole)
        return Within(tuple(questions), cut, f"{note}their first tokens are cut off")
    pairs = [pair for pair in zip(questions, whole, strict=True) if len(pair[1].token_ids) <= longest]
    if not pairs:
        raise DataError([Problem("[task]", f"{note}none is left", "allow more tokens, or truncate them")])
    kept, prompts = zip(*pairs, strict=True)
    return Within(kept, prompts, f"{note}they are left out")


def encode_demonstrations(
    questions: Sequence[Question], tokenizer: Tokenizer, context: int
) -> tuple[Demonstration, ...]:
    """Encode prompts with their demonstrations, to which the end-of-sequence token is added: behind a chat the one that
    the chat template writes there, behind plain text the first. A question without a demonstration gets that token
    alone. Prompt and demonstration may have at most `context` tokens together.

    Raises:
        DataError: a prompt is empty, or a question has more than `context` tokens; names every such question. Or it has
            characters that the tokenizer does not know; names all of them, and some such questions.
        ModelFolderError: there are chats, and the tokenizer has no chat template.
    """
    prompts = encode_prompts(questions, tokenizer, context)
    shown: list[Demonstration] = []
    problems: list[Problem] = []
    unknown = _Unknown(tokenizer)
    for prompt, question in zip(prompts, questions, strict=True):
        end = tokenizer.end_of_turn if _messages(question, tokenizer) else tokenizer.eos_token_ids[:1]
        try:
            answer = tokenizer.encode(question.demonstration or "", special_tokens=False) + end
        except DataError as error:
            unknown.add(question, question.demonstration or "", error)
            continue
        if (length := len(prompt.token_ids) + len(answer)) > context:
            found = f"prompt and demonstration of {length} tokens"
            problems.append(Problem(place_of(question), found, f"{context} fit"))
        shown.append(Demonstration(prompt_ids=prompt.token_ids, completion_ids=answer))
    refuse([*unknown.problems(), *problems])
    return tuple(shown)


def _shown(question: Question, tokenizer: Tokenizer) -> str | None:
    """Render a question by the chat template if it has messages; None: its prompt is plain text."""
    messages = _messages(question, tokenizer)
    if not messages:
        return None
    return tokenizer.render_chat(messages, opening=True, **dict(question.template_arguments))


def _messages(question: Question, tokenizer: Tokenizer) -> Sequence[Mapping[str, str]]:
    """Return the messages of a question that is a chat, or may be shown as one and there is a template; else none."""
    return question.messages or (question.as_chat if tokenizer.has_chat_template else ())


def place_of(question: Question) -> str:
    """Return the place of a question for messages: FILE:LINE, or its id if it is from no file."""
    return question.place or f"question {question.id}"


def refuse(problems: Sequence[Problem]) -> None:
    """Raise DataError if there are problems; else do nothing. The error has the first twenty different ones, and the
    number of the others."""
    problems = list(dict.fromkeys(problems))  # one file may hold training and held-out questions
    if len(problems) > _SHOWN:
        more = Problem("the task", f"{several(len(problems) - _SHOWN, 'more question')} like these")
        raise DataError([*problems[:_SHOWN], more])
    if problems:
        raise DataError(problems)
