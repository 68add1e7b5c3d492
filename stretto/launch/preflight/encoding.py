"""Questions become prompts of token ids; every one that the model cannot read is reported, with file and line."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from stretto.core.errors import DataError, Problem
from stretto.core.records import Prompt
from stretto.model.hf.tokenizer import Tokenizer
from stretto.trainer.messages import Demonstration, Preference
from stretto.worlds.data.preferences import Pair
from stretto.worlds.data.task import Question

_SHOWN = 20


def encode_prompts(questions: Iterable[Question], tokenizer: Tokenizer, room: int) -> tuple[Prompt, ...]:
    """Questions as token ids, by the chat template where the question is a chat; each has 1 to `room` of them.

    Raises:
        DataError: with every question that has characters which the tokenizer does not know, or that is too long.
        ModelFolderError: chats, and a tokenizer without a chat template.
    """
    prompts: list[Prompt] = []
    problems: list[Problem] = []
    for question in questions:
        try:
            ids = _encoded(question, tokenizer)
        except DataError as error:
            problems += (Problem(_place(question), problem.found, problem.remedy) for problem in error.problems)
            continue
        if 0 < len(ids) <= room:
            prompts.append(Prompt(id=question.id, token_ids=ids, text=question.text, answer=question.answer))
        else:
            remedy = (
                f"at most {room} fit (the context, or the engine's cache, less sampling.max_tokens)"
                if ids
                else "1 is needed"
            )
            problems.append(Problem(_place(question), f"a prompt of {len(ids)} tokens", remedy))
    _raise(problems)
    return tuple(prompts)


def encode_demonstrations(
    questions: Sequence[Question], tokenizer: Tokenizer, context: int
) -> tuple[Demonstration, ...]:
    """Prompts and demonstrated answers as token ids, `context` of them together at most; answers end with the end.

    Raises:
        DataError: as for `encode_prompts`.
    """
    prompts = encode_prompts(questions, tokenizer, context)
    end = tokenizer.eos_token_ids[:1]
    shown: list[Demonstration] = []
    problems: list[Problem] = []
    for prompt, question in zip(prompts, questions, strict=True):
        try:
            answer = tokenizer.encode(question.demonstration or "", special_tokens=False) + end
        except DataError as error:
            problems += (Problem(_place(question), problem.found, problem.remedy) for problem in error.problems)
            continue
        if (length := len(prompt.token_ids) + len(answer)) > context:
            problems.append(Problem(_place(question), f"prompt and answer of {length} tokens", f"{context} fit"))
        shown.append(Demonstration(prompt_ids=prompt.token_ids, completion_ids=answer))
    _raise(problems)
    return tuple(shown)


def encode_preferences(pairs: Sequence[Pair], tokenizer: Tokenizer, context: int) -> tuple[Preference, ...]:
    """Pairs as token ids, each prompt with either of its answers `context` of them at most.

    Raises:
        DataError: as for `encode_prompts`.
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


def _place(question: Question) -> str:
    return question.place or f"question {question.id}"


def _raise(problems: Sequence[Problem]) -> None:
    problems = list(dict.fromkeys(problems))  # a file may hold both the training questions and the held-out ones
    if len(problems) > _SHOWN:
        more = Problem("the task", f"{len(problems) - _SHOWN} more questions like these")
        raise DataError([*problems[:_SHOWN], more])
    if problems:
        raise DataError(problems)
