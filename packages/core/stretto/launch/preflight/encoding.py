"""Encoding questions to token ids. Every question that cannot be encoded is reported with file and line."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import msgspec

from stretto.core.errors import DataError, Problem
from stretto.core.records import Prompt
from stretto.model.hf.tokenizer import Tokenizer
from stretto.rollout.questions import Pair, Question
from stretto.trainer.messages import Demonstration, Preference
from stretto_verify.thoughts import opened

_SHOWN = 20  # most problems in one message
_LAST = 64  # number of last tokens of a prompt that are searched for an opening mark of reasoning


def encode_prompts(questions: Iterable[Question], tokenizer: Tokenizer, longest: int) -> tuple[Prompt, ...]:
    """Encode the prompts of questions; chats are rendered by the chat template.

    Raises:
        DataError: a prompt is empty, has more than `longest` tokens, or has characters that the tokenizer does not
            know; names every such question.
        ModelFolderError: there are chats, and the tokenizer has no chat template.
    """
    prompts: list[Prompt] = []
    problems: list[Problem] = []
    for question in questions:
        try:
            ids = _encoded(question, tokenizer)
        except DataError as error:
            problems += (Problem(place_of(question), problem.found, problem.remedy) for problem in error.problems)
            continue
        if 0 < len(ids) <= longest:
            opens = opened(tokenizer.spell(ids[-_LAST:]))
            prompts.append(Prompt(question.id, ids, question.text, question.answer, opens))
            continue
        remedy = f"at most {longest} fit (the context, or the engine's KV cache, less sampling.max_tokens)"
        problem = Problem(place_of(question), f"a prompt of {len(ids)} tokens", remedy if ids else "1 is needed")
        problems.append(problem)
    refuse(problems)
    return tuple(prompts)


def prompts_as_bytes(questions: Iterable[Question]) -> tuple[Prompt, ...]:
    """Make prompts without a tokenizer: each byte of the text counts as one token."""
    return tuple(
        Prompt(id=one.id, token_ids=tuple(_all_text(one).encode()), text=one.text, answer=one.answer)
        for one in questions
    )


def _all_text(question: Question) -> str:
    return "".join(message["content"] for message in question.messages) or question.text


@dataclass(frozen=True)
class Within:
    """Questions with their encoded prompts, none longer than a limit. `note`: a warning if prompts were left out or
    truncated for it; else empty."""

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
        which: names the questions in the note: "held out".

    Raises:
        DataError: a prompt is empty, or has characters that the tokenizer does not know; or all prompts are dropped.
        ModelFolderError: there are chats, and the tokenizer has no chat template.
    """
    whole = encode_prompts(questions, tokenizer, sys.maxsize)
    long = [prompt.id for prompt in whole if len(prompt.token_ids) > longest]
    if not long:
        return Within(tuple(questions), whole)
    first = place_of(next(question for question in questions if question.id == long[0]))
    note = (
        f"{len(long):,} of {len(whole):,} prompts ({which}) are longer than {longest:,} tokens; the first is {first}: "
    )
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
    """Encode prompts with their demonstrations, to which the end-of-sequence token is added. Prompt and demonstration
    may have at most `context` tokens together.

    Raises:
        DataError: a prompt is empty, a question has more than `context` tokens, or has characters that the tokenizer
            does not know; names every such question.
        ModelFolderError: there are chats, and the tokenizer has no chat template.
    """
    prompts = encode_prompts(questions, tokenizer, context)
    end = tokenizer.eos_token_ids[:1]
    shown: list[Demonstration] = []
    problems: list[Problem] = []
    for prompt, question in zip(prompts, questions, strict=True):
        try:
            answer = tokenizer.encode(question.demonstration or "", special_tokens=False) + end
        except DataError as error:
            problems += (Problem(place_of(question), problem.found, problem.remedy) for problem in error.problems)
            continue
        if (length := len(prompt.token_ids) + len(answer)) > context:
            problems.append(
                Problem(place_of(question), f"prompt and demonstration of {length} tokens", f"{context} fit")
            )
        shown.append(Demonstration(prompt_ids=prompt.token_ids, completion_ids=answer))
    refuse(problems)
    return tuple(shown)


def encode_preferences(pairs: Sequence[Pair], tokenizer: Tokenizer, context: int) -> tuple[Preference, ...]:
    """Encode preference pairs. A prompt with either completion may have at most `context` tokens.

    Raises:
        DataError: a prompt is empty, a pair has more than `context` tokens, or has characters that the tokenizer does
            not know; names every such pair.
        ModelFolderError: there are chats, and the tokenizer has no chat template.
    """
    shown = [replace(p.question, demonstration=answer) for p in pairs for answer in (p.question.answer, p.rejected)]
    both = encode_demonstrations(shown, tokenizer, context)
    return tuple(
        Preference(chosen.prompt_ids, chosen.completion_ids, rejected.completion_ids)
        for chosen, rejected in zip(both[::2], both[1::2], strict=True)
    )


def _encoded(question: Question, tokenizer: Tokenizer) -> tuple[int, ...]:
    messages = question.messages or (question.as_chat if tokenizer.has_chat_template else ())
    if not messages:
        return tokenizer.encode(question.text)
    return tokenizer.encode_chat(messages, **dict(question.template_arguments))


def place_of(question: Question) -> str:
    """Return the place of a question for errors: FILE:LINE, or its id if it is from no file."""
    return question.place or f"question {question.id}"


def refuse(problems: Sequence[Problem]) -> None:
    """Raise DataError if there are problems: with the first ones, and the number of the others."""
    problems = list(dict.fromkeys(problems))  # one file may hold training and held-out questions
    if len(problems) > _SHOWN:
        more = Problem("the task", f"{len(problems) - _SHOWN} more questions like these")
        raise DataError([*problems[:_SHOWN], more])
    if problems:
        raise DataError(problems)
