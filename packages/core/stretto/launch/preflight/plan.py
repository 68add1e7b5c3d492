"""The plan of a run: a recipe with its model, data and reward, all read and checked. No role is started here."""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import Any

import torch

from stretto.core.errors import DataError, Mistakes, Problem, RecipeError, UserError
from stretto.core.machine import Seat
from stretto.core.records import Prompt, Sampling
from stretto.doors.loading import from_package, of_application
from stretto.launch.preflight.base import base_folder, digest
from stretto.launch.preflight.checks import (
    check_cluster,
    check_dividable,
    check_engine_keys,
    check_in_flight,
    check_kind,
    check_machine,
    check_muon,
    check_of_servers,
    check_ray,
    check_reward_addresses,
    check_reward_function,
    check_reward_sources,
    check_top_k,
    check_trainable,
    check_vocabulary,
    longest_prompt_allowed,
    medium_of,
)
from stretto.launch.preflight.descriptors import check_descriptors, descriptors_needed
from stretto.launch.preflight.paths import check_data_files, data_files
from stretto.launch.preflight.questions import (
    Within,
    encode_demonstrations,
    encode_prompts,
    encode_within,
    place_of,
    refuse,
    sift,
)
from stretto.launch.recipe.extensions import AgentConfig
from stretto.launch.recipe.recipe import Recipe
from stretto.launch.recipe.sections import EvaluationSet
from stretto.model.hf.folder import ModelFolder, inspect_model_folder
from stretto.model.hf.tokenizer import Tokenizer, load_tokenizer
from stretto.rewards.built_in import BUILT_IN
from stretto.rewards.service.wire import Row
from stretto.rollout.prompts import PromptSource
from stretto.rollout.questions import Question, Questions, with_own_ids
from stretto.rollout.tasks import DatasetTask
from stretto.rollout.workflow import PLACE as WORKFLOW
from stretto.rollout.workflow import QuestionDetails, WorkflowConfig, WorkflowReady
from stretto.trainer.config import SupervisedConfig
from stretto.trainer.messages import Demonstration
from stretto_verify.thoughts import PIECES


@dataclass(frozen=True, kw_only=True)
class Outline:
    """A checked recipe with everything that is known without the model's weights: the model's shape, and the questions.
    `held_out`: the held-out prompts that are evaluated; `sets`: further sets to evaluate. `demonstrations`: empty
    without a warm start. `notes`: warnings. `seats`: GPUs of the roles; empty: the CPU. `origins`: (FILE:LINE, source)
    of each training prompt. `kept_apart`: number of held-out questions, evaluated or not. `reference`: the model of
    ``algorithm.reference.path``; None: no such path."""

    recipe: Recipe
    base: ModelFolder  # facts about the model before any training
    sampling: Sampling
    training: tuple[Prompt, ...]
    held_out: tuple[Prompt, ...]  # those that are evaluated
    demonstrations: Sequence[object]  # for the warm start; empty: none is to be done
    notes: tuple[str, ...] = ()  # warnings about the data and the reward
    sources: tuple[PromptSource, ...] = ()  # sources of the training prompts, in the order of the prompts
    origins: tuple[tuple[str, str], ...] = ()  # (FILE:LINE, source) of each training prompt
    sets: tuple[tuple[EvaluationSet, tuple[Prompt, ...]], ...] = ()  # further sets of questions to evaluate
    kept_apart: int = 0  # number of held-out questions; the first evaluation.prompts of them are evaluated
    seats: tuple[Seat, ...] = ()  # GPUs of the roles on this machine; empty: all run on the CPU
    reference: ModelFolder | None = None  # of algorithm.reference.path; None: no such path

    @property
    def longest_prompt(self) -> int:
        """Number of tokens of the longest prompt: training, held out, and further sets."""
        return longest_of((*self.training, *self.held_out, *further(self.sets)))

    @property
    def longest_sequence(self) -> int:
        """Most tokens of a trajectory, prompt included (`longest_sequence`)."""
        return longest_sequence(self.recipe, self.base, self.longest_prompt)


def further(sets: Iterable[tuple[EvaluationSet, Sequence[Prompt]]]) -> Iterator[Prompt]:
    """Iterate over the prompts of all of these sets of questions."""
    return (prompt for _, prompts in sets for prompt in prompts)


def longest_of(prompts: Iterable[Prompt]) -> int:
    """Number of tokens of the longest prompt."""
    return max(len(prompt.token_ids) for prompt in prompts)


def longest_sequence(recipe: Recipe, base: ModelFolder, longest_prompt: int) -> int:
    """Return the most tokens of a trajectory, prompt included. With a workflow it is all that fits into context and KV
    cache, since tokens are added between turns; else it follows from `longest_prompt`, in tokens. With a workflow it
    raises as `longest_prompt_allowed`."""
    if recipe.workflow is None:
        return longest_prompt + recipe.sampling.max_tokens
    return longest_prompt_allowed(recipe, base) + recipe.sampling.max_tokens


@dataclass(frozen=True, kw_only=True)
class Plan(Outline):
    """A checked recipe with everything that a run needs to start. `rows`: data for rewards, by (prompt, gold answer).
    `details`: data of the questions for a workflow. `warm_seat`: GPU of the warm start; None: the CPU, or none."""

    tokenizer: Tokenizer
    demonstrations: tuple[Demonstration, ...]
    rows: Mapping[tuple[str, str], Row] = field(default_factory=dict)  # (prompt, gold answer): data for rewards
    kept_apart_digest: str = ""  # digest of the held-out questions and their gold answers
    set_digests: Mapping[str, str] = field(default_factory=dict)  # the same of each further set's source, by its name
    fields: Mapping[str, str] = field(default_factory=dict)  # digests of the questions' further fields, by name
    reads: Sequence[str] | None = ()  # those that rewards or a workflow read; None: any
    details: QuestionDetails = field(default_factory=QuestionDetails)  # data of the questions for a workflow
    warm_seat: Seat | None = None  # GPU of the warm start, which runs before the roles


_WORKFLOWS = "stretto_workflows.run"
_ADDRESS = re.compile(r" at 0x[0-9A-Fa-f]+")  # in the text of an object, such as an image: another in each process
_BY_TOKENS = ("user_simulator",)  # needs a chat template, but its first turn takes the prompt's tokens as they are
_NO_DEMONSTRATIONS = Problem(
    "[warm_start]", "the task has no demonstrations", "add them to the data, or remove the section"
)


def make_plan(recipe: Recipe, *, has_policy: bool = False, dry: bool = False, trains: bool = True) -> Plan:
    """Read and check everything that the recipe names. The mistakes of its parts, its model and its data are raised
    together; checks that depend on several of these follow only if there are none.

    Args:
        has_policy: version 0 of the policy exists, so no warm start and no demonstrations are needed.
        dry: a dry run: user-defined outlets are tried too, and GPUs may be assumed.
        trains: the log-probabilities of what is sampled are used.

    Raises:
        RecipeError, ModelFolderError, DataError, RewardFunctionError, WorkflowError: has every problem of recipe,
            model, data, reward or workflow; its class is that of the first.
        RoleError: a process that tries the reward or reads gold answers does not start.
    """
    _check_descriptors(recipe)  # with too few, the other checks fail with misleading errors
    mistakes = Mistakes(UserError)
    told, needs, takes = _parts(recipe, mistakes, dry=dry)
    with mistakes:
        if isinstance(recipe.workflow, WorkflowConfig) and not has_policy:  # a run that began with it goes on
            _check_not_cut(recipe.task, recipe.workflow.function, needs)
    with mistakes:
        base, tokenizer, longest, reference = _model(recipe)
    with mistakes:
        read, read_sets, set_digests = _questions(recipe)
    mistakes.done()
    questions = (sifted := sift(recipe.rewards, read)).questions
    with mistakes:
        shown = () if recipe.warm_start is None or has_policy else _shown(recipe.warm_start, base, questions)
    with mistakes:
        training, held_out = encoded_within_limits(recipe, questions, tokenizer, longest)
    with mistakes:
        sets, asked, left_out = _sets(recipe, read_sets, tokenizer, longest)
    mistakes.done()
    rows = (*training.questions, *held_out.questions, *asked)
    if isinstance(recipe.workflow, WorkflowConfig):
        check_fits = from_package(f"{_WORKFLOWS}:check_workflow_fits", WORKFLOW)
        check_fits(recipe.workflow.function, needs, tokenizer, _plain(rows))
    _check_engines(recipe, base, tokenizer, (*training.prompts, *held_out.prompts, *further(sets)), trains)
    return Plan(
        recipe=recipe,
        base=base,
        reference=reference,
        tokenizer=tokenizer,
        sampling=recipe.sampling.record(tokenizer.eos_token_ids),
        training=training.prompts,
        held_out=held_out.prompts,
        origins=tuple((question.place, question.source) for question in training.questions),
        sources=_sources(training.questions, questions.weights),
        demonstrations=encode_demonstrations(shown, tokenizer, base.context_length),
        rows=_rows(recipe, rows, takes),
        sets=sets,
        details=_details(recipe, rows, tokenizer),
        kept_apart=len(questions.held_out),
        kept_apart_digest=digest(*((row.text, row.answer) for row in questions.held_out)),
        set_digests=set_digests,
        fields=_field_digests(recipe, (*questions.training, *questions.held_out)),
        reads=takes if recipe.workflow is None else None,
        notes=(
            *told,
            *filter(None, (*questions.notes, training.note, held_out.note)),
            *advice("notes:first_notes", recipe, questions, tokenizer),
            *sifted.warnings,
            *left_out,
            *advice("notes:last_notes", recipe, questions, asked, tried=has_policy),
        ),
    )


def _shown(config: SupervisedConfig, base: ModelFolder, questions: Questions) -> Sequence[Question]:
    """Return the questions of the warm start. Raises DataError if there is none, RecipeError if the optimizer would not
    train all matrices of the model."""
    if not (shown := questions.demonstrations):
        raise DataError([_NO_DEMONSTRATIONS])
    check_muon(config, base.path)
    return shown


def advice(name: str, *arguments: object, **settings: object) -> list[str]:
    """Call the function `name` (``module:function``) of `stretto_app.extensions.preflight` and return its warnings;
    none if the application is not installed. The function may refuse the recipe with a UserError."""
    found: list[str] = of_application(f"extensions.preflight.{name}", lambda *_, **__: [])(*arguments, **settings)
    return found


def _parts(recipe: Recipe, mistakes: Mistakes, *, dry: bool) -> tuple[list[str], WorkflowReady, tuple[str, ...] | None]:
    """Check the parts that the recipe names beside model and data, and the machine. Mistakes are added to `mistakes`,
    not raised. `dry`: also try user-defined outlets.

    Returns warnings, what the workflow needs of tokenizer and data, and the further fields of a row that the rewards
    take (None: all); with mistakes, as far as known.
    """
    told, needs = list[str](), WorkflowReady()
    takes: tuple[str, ...] | None = ()
    with mistakes:
        told = advice("trial:try_parts", recipe, outlets=dry)
    with mistakes:
        check_engine_keys(recipe, here=recipe.cluster.placer == "local")
    with mistakes:
        medium_of(recipe)
    with mistakes:
        takes = check_reward_function(recipe.rewards)
    with mistakes:
        check_reward_addresses(recipe.rewards)
    with mistakes:
        if isinstance(recipe.workflow, WorkflowConfig):
            needs = from_package(f"{_WORKFLOWS}:check_workflow_class", WORKFLOW)(recipe.workflow)
    with mistakes:
        check_machine(recipe, dry=dry)
    with mistakes:
        check_cluster(recipe)
    with mistakes:
        check_in_flight(recipe.rollout)
    return told, needs, takes


def _check_not_cut(task: object, workflow: str, needs: WorkflowReady) -> None:
    """Raise RecipeError if the task truncates prompts that the workflow renders whole, by the chat template."""
    why = needs.needs_chat_template if workflow not in _BY_TOKENS else ""
    if why and isinstance(task, DatasetTask) and task.long_prompts == "truncate":
        remedy = 'choose "drop" or "refuse": the template renders each prompt whole'
        raise RecipeError([Problem("task.long_prompts", f"'truncate', and {workflow!r} {why}", remedy)])


def _model(recipe: Recipe) -> tuple[ModelFolder, Tokenizer, int, ModelFolder | None]:
    """Check the model of the recipe; returns its facts, tokenizer, longest allowed prompt in tokens, and the facts of a
    reference model or None. Raises ModelFolderError, RecipeError or WorkflowError with every problem of the model."""
    base, mistakes = inspect_model_folder(base_folder(recipe.model, recipe.seed), "model.path"), Mistakes(UserError)
    check_kind(base)
    with mistakes:
        check_of_servers("check_model", recipe, base)
    with mistakes:
        check_trainable(recipe.trainer, base.path, torch.cuda.device_count())
    with mistakes:
        longest = longest_prompt_allowed(recipe, base)
    with mistakes:
        check_top_k(recipe, base)
    with mistakes:
        tokenizer = load_tokenizer(base.path, recipe.model.special_tokens_in_messages, kept=PIECES)
        reference = _reference(recipe, tokenizer)
        _check_agents(recipe, tokenizer)
    mistakes.done()
    return base, tokenizer, longest, reference


def _check_engines(
    recipe: Recipe, base: ModelFolder, tokenizer: Tokenizer, prompts: Sequence[Prompt], trains: bool
) -> None:
    """Check that the servers take the longest trajectory and the prompts, and that Ray has room for the engines; does
    nothing for native engines without Ray. `prompts`: all encoded prompts. Raises RecipeError if a check fails."""
    check_of_servers("check_window", recipe, base, longest_sequence(recipe, base, longest_of(prompts)))
    check_of_servers(
        "check_servers", recipe, base, tokenizer, [one.token_ids for one in prompts], None if trains else False
    )
    check_ray(recipe)


def _reference(recipe: Recipe, tokenizer: Tokenizer) -> ModelFolder | None:
    """Return the checked facts of the model ``algorithm.reference.path``; None if the recipe names none. Raises
    ModelFolderError if it cannot be loaded, is not supported or has another vocabulary than `tokenizer`, and
    RecipeError if the trainer's ranks cannot divide its matrices or heads."""
    asked, key = recipe.algorithm.reference, "algorithm.reference.path"
    if asked is None or asked.path is None:
        return None
    found = check_vocabulary(asked.path, tokenizer, key)
    check_dividable(recipe.trainer, found.path, key)
    return found


def _check_agents(recipe: Recipe, tokenizer: Tokenizer) -> None:
    """Raise RecipeError, WorkflowError or ModelFolderError if agents of the recipe cannot be started or cannot reach
    the policy; do nothing for a recipe without agents."""
    if isinstance(recipe.workflow, AgentConfig):
        check = from_package("stretto_app.extensions.agents:check_agents", "workflow.kind", "stretto_gateway")
        check(recipe, tokenizer)


def _check_descriptors(recipe: Recipe) -> None:
    of_workflows = recipe.workflow.workers if isinstance(recipe.workflow, WorkflowConfig) else 0
    check_descriptors(
        descriptors_needed(
            engines=recipe.engine.count,
            ranks=recipe.trainer.ranks,
            reward_workers=recipe.rewards.workers + of_workflows,
            groups=recipe.rollout.in_flight_bounds[1],
            agents=recipe.workflow.parallel if isinstance(recipe.workflow, AgentConfig) else 0,
        )
    )


def _questions(recipe: Recipe) -> tuple[Questions, list[list[Question]], dict[str, str]]:
    """Read the questions of the task, and of each further set in the recipe's order; check that each source has a
    reward. In each of these parts, questions get an id of their own. Last: a digest of each set's source, by name.

    Raises:
        DataError: a file is missing or has mistakes; has those of all files.
        RewardFunctionError: a reward names an unknown source, or a source has no reward.
    """
    check_data_files(data_files(recipe))
    mistakes, sets, digests = Mistakes(), list[list[Question]](), dict[str, str]()
    with mistakes:
        found = recipe.task.questions(recipe.seed)
    for one in recipe.evaluation.sets:
        with mistakes:
            first, last, _ = one.source.questions(recipe.seed)
            sets.append([*first, *last][: one.prompts])
            digests[one.name] = digest(*((row.text, row.answer) for row in (*first, *last)))
    mistakes.done()
    names = {question.source for question in (*found.training, *found.held_out)}
    check_reward_sources(recipe.rewards, names | {one.source.title for one in recipe.evaluation.sets})
    parts = (found.training, found.held_out, *sets)
    training, held_out, *sets = with_own_ids(parts, apart=recipe.workflow is not None)
    return replace(found, training=training, held_out=held_out), sets, digests


def encoded_within_limits(
    recipe: Recipe, questions: Questions, tokenizer: Tokenizer, longest: int
) -> tuple[Within, Within]:
    """Encode training and held-out prompts, with long prompts handled as the task says: refused, dropped or truncated.
    Of the held-out questions only the first `evaluation.prompts` are encoded.

    `longest`: most tokens of a prompt; the task may allow fewer. Returns the training and the held-out questions with
    their prompts.

    Raises:
        DataError: a prompt is empty, too long if the task refuses long ones, or has characters that the tokenizer does
            not know; or all prompts are dropped.
        ModelFolderError: there are chats, and the tokenizer has no chat template.
    """
    task = recipe.task
    limit, policy = (task.max_prompt_tokens, task.long_prompts) if isinstance(task, DatasetTask) else (None, "refuse")
    longest = min(longest, limit or longest)
    asked = list(questions.held_out)[: recipe.evaluation.prompts]
    if policy == "refuse":  # with the mistakes of both
        whole = encode_prompts([*questions.training, *asked], tokenizer, longest)
        count = len(questions.training)
        return Within(tuple(questions.training), whole[:count]), Within(tuple(asked), whole[count:])
    return (
        encode_within(questions.training, tokenizer, longest, policy, "for training"),
        encode_within(asked, tokenizer, longest, policy, "held out"),
    )


def _sets(
    recipe: Recipe, read: Sequence[list[Question]], tokenizer: Tokenizer, longest: int
) -> tuple[tuple[tuple[EvaluationSet, tuple[Prompt, ...]], ...], list[Question], list[str]]:
    """Encode the further sets of questions. Questions with unreadable gold answers are left out. `read`: the questions
    of each set, in the order of the recipe; `longest`: most tokens of a prompt.

    Returns the sets with their prompts, all of their questions, and a warning for each question that was left out.
    Raises DataError for a prompt that cannot be encoded or is too long, or a set without a readable gold answer;
    further as `sift` and `encode_prompts`.
    """
    found: list[tuple[EvaluationSet, tuple[Prompt, ...]]] = []
    asked, told = list[Question](), list[str]()
    for one, questions in zip(recipe.evaluation.sets, read, strict=True):
        kept = (sifted := sift(recipe.rewards, Questions(questions, []))).questions.training
        found.append((one, encode_prompts(kept, tokenizer, longest)))
        asked += kept
        told += [f"evaluation set {one.name}: {warning}" for warning in sifted.warnings]
    return tuple(found), asked, told


def _sources(questions: Sequence[Question], weights: Mapping[str, float]) -> tuple[PromptSource, ...]:
    """Return name, number of questions and sampling weight (None: not given) of each source. `weights`: the weights by
    source. Raises DataError if a source with a weight has no question left."""
    counted = Counter(question.source for question in questions)
    if empty := [name for name in weights if not counted[name]]:
        found = f"no question of source {empty[0]!r} is left, which has a weight"
        raise DataError([Problem("[task]", found, "look at the notes, or remove the source")])
    return tuple(PromptSource(name, count, weights.get(name)) for name, count in counted.items())


def _rows(recipe: Recipe, questions: Sequence[Question], takes: Sequence[str] | None) -> dict[tuple[str, str], Row]:
    """Collect the data of questions that rewards need, by (prompt, gold answer): further fields of the row for
    user-defined rewards, and the source if rewards depend on it. Questions without such data are left out. `takes`:
    the further fields that the rewards take; None: all. Raises DataError if two questions with the same key differ in
    the source or in one of these fields; of other fields the first row's are kept."""
    parts = recipe.rewards.parts
    own = _has_own_rewards(recipe)
    by_source = any(part.sources for part in parts)
    found: dict[tuple[str, str], tuple[Row, Question]] = {}
    contrary: dict[str, tuple[Question, list[Question]]] = {}  # what differs: the first of the rows, the others
    for asked in questions if own or by_source else ():
        row = Row(asked.fields if own else "", asked.source if by_source else "")
        known, first = found.setdefault((asked.text, asked.answer), (row, asked))
        if known != row and (differs := _difference(known, row, takes)):
            contrary.setdefault(differs, (first, []))[1].append(asked)
    problems = []
    for differs, (first, rows) in contrary.items():
        places = list(dict.fromkeys(map(place_of, rows)))  # one file may hold training and held-out questions
        more = f" ({len(places):,} such rows: {', '.join(places[:3])}{', ...' * (len(places) > 3)})"
        told = f"has the prompt and the gold answer of {place_of(first)}, and another {differs}"
        remedy = f"prompt and gold answer identify the row of a completion: give both the same {differs}, or remove one"
        problems.append(Problem(places[0], told + more * (len(places) > 1), remedy))
    refuse(problems)
    return {key: row for key, (row, _) in found.items() if row != Row()}


def _has_own_rewards(recipe: Recipe) -> bool:
    return any(part.function not in BUILT_IN for part in recipe.rewards.parts)


def _field_digests(recipe: Recipe, questions: Sequence[Question]) -> dict[str, str]:
    found = defaultdict[str, Any](lambda: blake2b(digest_size=8))
    for place, row in enumerate(questions if recipe.workflow is not None or _has_own_rewards(recipe) else ()):
        for name, value in json.loads(row.fields or "{}").items():
            found[name].update(f"{place} {_ADDRESS.sub('', json.dumps(value))}\n".encode())
    return {name: whole.hexdigest() for name, whole in found.items()}


def _difference(first: Row, row: Row, takes: Sequence[str] | None) -> str:
    """Quoted name of the first field that the rewards take (`takes`; None: all) in which two rows differ, or "source";
    "" if there is none."""
    one, other = (json.loads(each.fields or "{}") for each in (first, row))
    for name in {**one, **other} if takes is None else takes:
        if (name in one, one.get(name)) != (name in other, other.get(name)):
            return f"{name!r}"
    return "source" if first.source != row.source else ""


def _details(recipe: Recipe, questions: Sequence[Question], tokenizer: Tokenizer) -> QuestionDetails:
    """Collect the further fields of questions, the chats and their arguments of the template, for a workflow; empty
    without one."""
    if recipe.workflow is None:
        return QuestionDetails()
    chats = {
        row.key: row.messages or row.as_chat
        for row in questions
        if row.messages or (row.as_chat and tokenizer.has_chat_template)
    }
    arguments = {row.key: dict(row.template_arguments) for row in questions if row.template_arguments}
    return QuestionDetails({row.key: row.fields for row in questions if row.fields}, chats, arguments)


def _plain(questions: Sequence[Question]) -> str | None:
    """Return the place (FILE:LINE, or "[task]") of the first prompt that is no chat; None if all are chats."""
    return next((row.place or "[task]" for row in questions if not (row.messages or row.as_chat)), None)
