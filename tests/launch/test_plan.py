"""Everything that can be known before a process starts.

- A question, a model folder, a reward, a port that is not what it should be is named with its place.
- What is read is what is asked: prompts by the tokenizer, demonstrations that end with the end.
- The memory estimate grows with what needs memory.
"""

import json
import shutil
import socket
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers.processors import TemplateProcessing

from stretto.core.errors import RecipeError, UserError
from stretto.core.machine import available_memory
from stretto.launch.assemble.specs import Endpoints, engine_specs, trainer_spec
from stretto.launch.preflight.base import base_folder, digest
from stretto.launch.preflight.devices import engine_parts, rank_of
from stretto.launch.preflight.plan import Plan, make_plan
from stretto.launch.recipe.recipe import load_recipe, validate
from stretto.launch.train import fitting
from stretto.model.hf.build import build_policy
from stretto.model.hf.folder import inspect_model_folder
from stretto.model.hf.tokenizer import load_tokenizer
from stretto.rollout.questions import Question
from stretto_app.extensions.preflight.estimates import estimate_disk, estimate_memory, warnings
from stretto_app.extensions.preflight.notes import _template_notes
from tests.tiny_policy import EXPERTS, SMALL, make_of_family

pytestmark = pytest.mark.usefixtures("untried")

NEW = Path("runs")  # where a run would be written
GOOD = {"prompt": "3+8=", "answer": "11", "demonstration": "11"}
FOUR = [GOOD | {"prompt": f"{number}+{11 - number}="} for number in (3, 4, 5, 6)]
REWARDS = "tests.launch.rewards_for_tests"
OWN = {"function": f"{REWARDS}:length"}

Tree = dict[str, Any]
Planner = Callable[..., Plan]


@pytest.fixture
def plan_for(policy: Path, tmp_path: Path) -> Planner:
    """A plan of rows and settings: ``plan_for([row, ...], rewards={"function": ...})``."""

    def plan(rows: list[Tree] | None = None, **sections: Any) -> Plan:
        file = tmp_path / "rows.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in (rows or FOUR)))
        tree = {
            "model": {"path": str(policy)},
            "task": {"kind": "jsonl", "file": str(file), "held_out": 1},
            "trainer": {},
            "sampling": {"max_tokens": 16},
            "rollout": {"batch_size": 2},
        }
        return make_plan(validate(tree | sections, "recipe.toml"))

    return plan


def message(plan_for: Planner, rows: list[Tree] | None = None, **sections: Any) -> str:
    with pytest.raises(UserError) as caught:
        plan_for(rows, **sections)
    assert caught.value.exit_code == 2
    return str(caught.value)


def test_prompts_are_read_by_the_models_tokenizer(plan_for: Planner, policy: Path) -> None:
    plan = plan_for(warm_start={})
    encode = load_tokenizer(policy).encode
    assert [prompt.token_ids for prompt in plan.training] == [encode(row["prompt"]) for row in FOUR[:3]]
    assert [prompt.id for prompt in plan.held_out] == ["4"]
    assert (plan.longest_prompt, plan.sampling.stop_token_ids) == (4, (1,))
    assert {shown.completion_ids for shown in plan.demonstrations} == {(3, 3, 1)}


def test_memory_is_planned_for_the_longest_trajectory(plan_for: Planner) -> None:
    """A single turn is its prompt and a completion; a conversation may fill what the context and the cache hold."""
    trainer, retry = {"micro_batch_tokens": 8}, {"function": "multi_turn", "settings": {"feedback": "3"}}
    turn, conversation = plan_for(trainer=trainer), plan_for(trainer=trainer, workflow=retry)
    assert turn.longest_sequence == turn.longest_prompt + 16
    assert conversation.longest_sequence == conversation.base.context_length > turn.longest_sequence
    assert rank_of(conversation).total > rank_of(turn).total
    assert engine_parts(conversation)["cache"] > engine_parts(turn)["cache"]


def test_a_demonstrated_answer_does_not_begin_as_a_text_does(plan_for: Planner, policy: Path, tmp_path: Path) -> None:
    folder = tmp_path / "with-beginning"
    shutil.copytree(policy, folder)
    tokenizer = load_tokenizer(folder)._whole
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<pad> $A", special_tokens=[("<pad>", 0)])
    tokenizer.save_pretrained(folder)
    plan = plan_for(warm_start={}, model={"path": str(folder)})
    assert {shown.prompt_ids[0] for shown in plan.demonstrations} == {0}
    assert {shown.completion_ids for shown in plan.demonstrations} == {(3, 3, 1)}


def test_a_prompt_that_leaves_no_room_for_an_answer_is_named_with_its_line(plan_for: Planner, tmp_path: Path) -> None:
    fits, long = GOOD | {"prompt": "1" * 16}, GOOD | {"prompt": "1" * 17}
    assert plan_for([fits, fits]).longest_prompt == 16
    told = message(plan_for, [fits, long, fits, long])
    remedy = "at most 16 fit (the context, or the engine's KV cache, less sampling.max_tokens)"
    place = f"{tmp_path}/rows.jsonl"
    assert told.splitlines() == [f"{place}:{line}: a prompt of 17 tokens; {remedy}" for line in (2, 4)]


def test_a_character_that_the_model_does_not_know_is_named_with_its_line(plan_for: Planner, tmp_path: Path) -> None:
    told = message(plan_for, [GOOD, GOOD | {"prompt": "3 apples="}, GOOD])
    assert told.startswith(f"{tmp_path}/rows.jsonl:2: '3 apples='")
    assert "not in the vocabulary: 'a' 'e' 'l' 'p' 's'" in told
    told = message(plan_for, [GOOD, GOOD, GOOD | {"demonstration": "elf"}, GOOD], warm_start={})
    assert told.startswith(f"{tmp_path}/rows.jsonl:3: 'elf'")


def test_characters_that_the_model_does_not_know_are_named_together(plan_for: Planner, tmp_path: Path) -> None:
    strange = [GOOD | {"prompt": f"3{letter}="} for letter in "zyxz"]
    told = message(plan_for, [GOOD, *strange, GOOD, GOOD | {"prompt": "1" * 17}])
    first, long = told.splitlines()
    places = ", ".join(f"{tmp_path}/rows.jsonl:{line}" for line in (3, 4, 5))
    assert first.startswith(f"{tmp_path}/rows.jsonl:2: '3z=' cannot be encoded (")
    assert first.endswith(f"), nor can {places}; not in the vocabulary: 'x' 'y' 'z'")
    assert long.startswith(f"{tmp_path}/rows.jsonl:7: a prompt of 17 tokens")
    told = message(plan_for, [GOOD | {"prompt": "w="}] * 9)
    assert told.endswith(".jsonl:4 and 5 more; not in the vocabulary: 'w'")


def test_texts_are_asked_by_the_chat_template_if_the_task_says(plan_for: Planner, policy: Path, tmp_path: Path) -> None:
    folder = tmp_path / "chatting"
    shutil.copytree(policy, folder)
    tokenizer = load_tokenizer(folder)
    tokenizer._whole.chat_template = "{% for m in messages %}+{{ m.content }}{% endfor %}{{ sign }}"
    tokenizer._whole.save_pretrained(folder)

    def asked(**task: object) -> tuple[str, Plan]:
        rows = {"kind": "jsonl", "file": str(tmp_path / "rows.jsonl"), "held_out": 1}
        plan = plan_for(model={"path": str(folder)}, task=rows | task)
        return tokenizer.decode(plan.training[0].token_ids), plan

    plain, warned = asked()
    assert plain == "3+8="
    assert any('task.chat_template="auto"' in warning for warning in warnings(warned, NEW))
    chat, silent = asked(chat_template="auto", template_arguments={"sign": "-"})
    assert chat == "+3+8=-"
    assert not any("chat template" in warning for warning in warnings(silent, NEW))
    assert asked(system_prompt="11")[0] == "+11+3+8="
    rows = {"kind": "jsonl", "file": str(tmp_path / "rows.jsonl"), "held_out": 1, "chat_template": "auto"}
    bare = plan_for(task=rows)  # by a tokenizer that has none
    assert tokenizer.decode(bare.training[0].token_ids) == "3+8="
    alone = 'chat_template is "auto", and the tokenizer has no chat template: the model gets plain texts as they stand'
    assert [one for one in warnings(bare, NEW) if "chat" in one] == [alone]
    of_gym = ({"role": "system", "content": "Say a number."}, {"role": "user", "content": "3+8="})
    row = Question("1", "3+8=", "11", as_chat=of_gym)
    assert _template_notes([row], bare.tokenizer) == [f"{alone}, without their system prompt"]
    assert "has no chat template" in message(plan_for, FOUR, task=rows | {"system_prompt": "11"})


def test_rows_that_a_reward_could_not_tell_apart_are_refused(plan_for: Planner, tmp_path: Path) -> None:
    rows = [row | {"level": level} for level, row in enumerate(FOUR)]
    assert plan_for(rows, rewards=OWN).rows["4+7=", "11"].fields == '{"demonstration": "11", "level": 1}'
    assert plan_for(rows).rows == {}, "a built-in reward takes none"
    again: list[Tree] = [*rows, *({**row, "level": 9} for row in FOUR), FOUR[2]]
    plan = plan_for(again, rewards=OWN)
    assert len(plan.rows) == len({row["prompt"] for row in FOUR}), "this reward takes no further field"
    assert any("an earlier row has with the same answer" in note for note in warnings(plan, NEW))
    place = tmp_path / "rows.jsonl"
    for reward in ("leveled", "leveled_by_name"):
        told = message(plan_for, again, rewards={"function": f"{REWARDS}:{reward}"})
        said = f"{place}:5: has the prompt and the gold answer of {place}:1, and another 'level' "
        assert told.startswith(f"{said}(5 such rows: {place}:5, {place}:6, {place}:7, ...); "), told
        assert told.endswith("give both the same 'level', or remove one")


def test_a_reward_is_looked_for_beside_its_recipe_first(policy: Path, tmp_path: Path) -> None:
    (tmp_path / "beside_rewards.py").write_text("def own(prompt, completion, answer): return completion == answer\n")
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in FOUR))
    text = f'[model]\npath = "{policy}"\n[task]\nkind = "jsonl"\nfile = "rows.jsonl"\nheld_out = 1\n[trainer]\n'
    (tmp_path / "recipe.toml").write_text(
        f'{text}[sampling]\nmax_tokens = 8\n[rewards]\nfunction = "beside_rewards:own"\n'
    )
    recipe = load_recipe(tmp_path / "recipe.toml")
    assert recipe.rewards.path == str(tmp_path)
    assert not any("reward" in note for note in make_plan(recipe).notes)


def test_a_reference_of_another_vocabulary_is_refused(plan_for: Planner, policy: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    build_policy(SMALL.model_copy(update={"alphabet": "0123456789+-*"}), other, seed=1)
    told = message(plan_for, algorithm={"reference": {"path": str(other)}})
    assert told.startswith(f"{other}: its vocabulary")
    assert "algorithm.reference.path needs a model with the policy's tokenizer" in told
    assert "no such folder" in message(plan_for, algorithm={"reference": {"path": str(tmp_path / "none")}})
    plan = plan_for(algorithm={"reference": {"path": str(policy)}})
    alone = plan_for()
    assert estimate_memory(plan).trainer - estimate_memory(alone).trainer == plan.base.parameters * 4


def test_a_larger_reference_counts_with_its_own_size_and_must_divide(plan_for: Planner, tmp_path: Path) -> None:
    large, wide = tmp_path / "large", SMALL.model_copy(update={"heads": 4, "kv_heads": 4, "layers": 3})
    build_policy(wide, large, seed=1)
    reference = {"reference": {"path": str(large)}}
    plan = plan_for(algorithm=reference)
    assert (held := rank_of(plan).parts["reference"]) == 4 * inspect_model_folder(large).parameters
    assert held > rank_of(plan).parts["weights"]
    model, trainer = {"path": str(large)}, {"ranks": 2, "context_parallel": 2}
    narrower = {"reference": {"path": str(plan.base.path)}}
    plan_for(model=model, trainer=trainer, algorithm=reference)
    told = message(plan_for, model=model, trainer=trainer, algorithm=narrower)
    assert "trainer.context_parallel: 2 does not divide num_attention_heads = 1" in told
    assert "of algorithm.reference.path; one of 1" in told


def test_an_answer_longer_than_a_micro_batch_is_worth_a_warning(plan_for: Planner) -> None:
    (told,) = [note for note in warnings(plan_for(trainer={"micro_batch_tokens": 19}), NEW) if "micro_batch" in note]
    assert "may have 20 tokens, more than trainer.micro_batch_tokens = 19" in told
    assert not [note for note in warnings(plan_for(trainer={"micro_batch_tokens": 20}), NEW) if "micro_batch" in note]


def test_the_engine_and_the_trainer_get_one_setting(plan_for: Planner) -> None:
    section = {"max_tokens": 16, "temperature": 0.7, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "stop": ["=", "\n"]}
    sampling = plan_for(sampling=section).sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.7, 0.9, 5, 0.1)
    assert sampling.stop == ("=", "\n")


#: Rows (None: `FOUR`), sections, and the message, or its end.
MISTAKES: dict[str, tuple[list[Tree] | None, Tree, str]] = {
    "a chat without a template": ([GOOD | {"prompt": [{"role": "user", "content": "3+8="}]}, GOOD], {},
     "has no chat template"),
    "a warm start without demonstrations": ([{"prompt": "3+8=", "answer": "11"}] * 2, {"warm_start": {}},
     "[warm_start]: the task has no demonstrations"),
    "a demonstration beyond the context": ([GOOD | {"demonstration": "1" * 28}, GOOD], {"warm_start": {}},
     "rows.jsonl:1: prompt and demonstration of 33 tokens; 32 fit"),
    "more than twenty mistakes": ([GOOD | {"prompt": "1" * 17}] * 30, {}, "the task: 10 more questions like these"),
    "answers as long as the context": (None, {"sampling": {"max_tokens": 32}},
     "sampling.max_tokens = 32, and the model's context has 32 tokens"),
    "answers longer than the cache": (None, {"engine": {"cache_gib": 1e-6}},
     "engine.cache_gib: 1e-06 holds 0 tokens, and sampling.max_tokens = 16"),
    "more likeliest tokens than there are": (None, {"sampling": {"max_tokens": 16, "top_k": 10_000}},
     "sampling.top_k = 10000, and the model's vocabulary has"),
    "ports beyond the last": (None, {"engine": {"transport": "tcp", "base_port": 65_535, "count": 2}},
     "engine.base_port: 65535, and 2 engines need 2 ports from there; ports end at 65535"),
}  # fmt: skip


@pytest.mark.parametrize(("rows", "sections", "told"), MISTAKES.values(), ids=MISTAKES)
def test_what_does_not_fit_is_refused(plan_for: Planner, rows: list[Tree] | None, sections: Tree, told: str) -> None:
    assert told in message(plan_for, rows, **sections)


@pytest.mark.parametrize(
    ("key", "value", "told"),
    [
        ("kv_lora_rank", 8, "latent keys and values"),
        ("final_logit_softcapping", 30.0, "= 30.0 changes the logits after the output matrix"),
    ],
)
def test_a_model_that_no_engine_or_no_trainer_computes_is_refused_before_anything_starts(
    plan_for: Planner, policy: Path, tmp_path: Path, key: str, value: float, told: str
) -> None:
    folder = Path(shutil.copytree(policy, tmp_path / "other"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {key: value}))
    assert told in message(plan_for, model={"path": str(folder)})


def test_muon_is_refused_with_the_name_of_a_matrix_that_it_would_not_train(plan_for: Planner, tmp_path: Path) -> None:
    folder = tmp_path / "experts"
    build_policy(SMALL, folder, seed=1)
    plan_for(model={"path": str(folder)}, warm_start={"optimizer": "muon"})
    make_of_family(folder, "qwen3_moe", EXPERTS, SMALL, seed=1)
    told = message(plan_for, model={"path": str(folder)}, warm_start={"optimizer": "muon"})
    assert "warm_start.optimizer: 'muon', and model.layers.0.mlp." in told
    plan_for(model={"path": str(folder)}, warm_start={})


def test_a_reward_that_exits_is_refused(plan_for: Planner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "unruly.py").write_text("import os; os._exit(7)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert "ended while starting: exit status 7" in message(plan_for, rewards={"function": "unruly:reward"})


def test_a_port_in_use_is_refused_before_anything_starts(plan_for: Planner) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        engine = {"transport": "tcp", "base_port": port, "count": 1}
        assert message(plan_for, engine=engine) == f"engine.base_port: port {port} is in use; choose free ports"
        plan_for(engine=engine | {"transport": "unix"})
        plan_for(engine=engine, cluster={"placer": "given", "listen": "127.0.0.1:0"})  # engines of other machines
    plan_for(engine=engine)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_gpu_that_is_not_there_is_refused(plan_for: Planner) -> None:
    gpu = {"device": "cuda"}
    told = message(plan_for, engine=gpu, trainer=gpu, warm_start=gpu)
    assert [line.partition(":")[0] for line in told.splitlines()] == [
        "engine.device",
        "trainer.device",
        "warm_start.device",
    ]
    assert "torch finds no GPU that it can use; 'auto' takes a GPU if there is one" in told
    plan = plan_for(engine=gpu | {"count": 64}, cluster={"placer": "given", "listen": "127.0.0.1:0"})
    assert estimate_memory(plan).engines == 0  # of machines that join, and are asked then


def test_a_row_that_is_asked_in_training_and_held_out_is_named_once(plan_for: Planner, tmp_path: Path) -> None:
    file = str(tmp_path / "rows.jsonl")
    task = {"kind": "jsonl", "file": file, "held_out_file": file}
    assert len(message(plan_for, [GOOD, GOOD | {"prompt": "3 apples="}], task=task).splitlines()) == 1


def test_an_engine_waits_for_its_first_weights_as_long_as_the_trainer_may_start_and_publish(
    plan_for: Planner, tmp_path: Path
) -> None:
    plan = plan_for(deadlines={"start": 20.0, "save": 30.0})
    for published, seconds in ((True, 50.0), (False, 0.0)):
        endpoints = Endpoints("mailbox", tmp_path, tmp_path)
        (spec,) = engine_specs(plan.recipe, plan.base.path, endpoints, published=published)
        assert spec.publication_seconds == seconds


@pytest.mark.parametrize("key", ["max_in_flight", "max_in_flight_max"])
def test_more_completions_in_flight_than_an_engine_queues(plan_for: Planner, key: str) -> None:
    rollout = {"batch_size": 2, "group_size": 8, "max_in_flight": "auto"}
    plan_for(rollout=rollout | {key: 8192})  # 65,536 completions
    assert message(plan_for, rollout=rollout | {key: 8193}) == (
        f"rollout.{key}: 8,193 groups of 8 (group_size) are 65,544 completions; an engine queues at most 65,536"
    )


def test_the_memory_estimate_grows_with_what_needs_memory(plan_for: Planner) -> None:
    small = estimate_memory(plan_for())
    assert small.total == small.trainer + small.engines + small.others
    assert 0 < small.available == pytest.approx(available_memory(), rel=0.2)
    assert estimate_memory(plan_for(engine={"count": 3})).engines == 3 * small.engines
    assert estimate_memory(plan_for(engine={"slots": 1024})).engines > small.engines
    assert estimate_memory(plan_for(trainer={"micro_batch_tokens": 65_536})).trainer > small.trainer
    assert "GiB; available" in str(small)


def test_the_disk_estimate_counts_what_each_checkpoint_holds(plan_for: Planner, tmp_path: Path) -> None:
    alone = estimate_disk(plan_for(store={"keep_checkpoints": 3}), tmp_path)
    assert alone.checkpoints == 4 * 3 * alone.policies // 2, "parameters and two moments; of policies one and the start"
    critic = {"advantages": {"kind": "gae", "critic": {}}}
    judged = estimate_disk(plan_for(store={"keep_checkpoints": 3}, algorithm=critic), tmp_path)
    assert judged.checkpoints == 2 * alone.checkpoints
    assert judged.total - alone.total == alone.checkpoints


def test_a_run_that_may_outgrow_its_disk_is_warned_of_with_the_key_to_it(plan_for: Planner, tmp_path: Path) -> None:
    free = estimate_disk(plan_for(), tmp_path).available
    steps = 2 * free // estimate_disk(plan_for(trainer={"steps": 1, "keep_versions": "all"}), tmp_path).policies
    many = {"steps": 4 * steps, "keep_versions": "all"}
    (said,) = [note for note in warnings(plan_for(trainer=many), tmp_path) if "disk" in note]
    assert f"may not fit on the disk of {tmp_path}: up to " in said
    assert said.endswith("most of it policies: fewer trainer.keep_versions shrinks it")
    assert not [note for note in warnings(plan_for(), tmp_path) if "disk" in note]


def test_what_a_resumed_run_has_written_needs_no_further_room(plan_for: Planner, tmp_path: Path) -> None:
    assert estimate_disk(plan_for(), tmp_path).written == 0
    (inner := tmp_path / "run" / "policy").mkdir(parents=True)
    (inner / "model.safetensors").write_bytes(bytes(1000))
    assert estimate_disk(plan_for(), tmp_path / "run").written == 0, "it is no run"
    (tmp_path / "run" / "ledger.sqlite").write_bytes(bytes(24))
    assert estimate_disk(plan_for(), tmp_path / "run").written == 1024


def test_what_shrinks_a_rank_is_said_once(plan_for: Planner, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside the memory; a warning has the sums, and what makes them smaller."""
    monkeypatch.setattr("stretto_app.extensions.preflight.estimates.available_memory", lambda: 1 << 20)
    memory = estimate_memory(plan := plan_for())
    assert memory.total > memory.available
    (said,) = [note for note in warnings(plan, NEW) if "may not fit into memory" in note]
    assert str(memory.rank) in str(memory)
    assert str(memory.rank) not in said
    assert "engine.slots" in said


def test_what_works_but_perhaps_not_as_hoped_is_said(plan_for: Planner) -> None:
    assert warnings(plan_for(engine={"threads": 1}, rollout={"batch_size": 2, "max_staleness": 0}), NEW) == []
    said = warnings(plan_for(engine={"count": 200}, rollout={"batch_size": 4}, trainer={"threads": 100}), NEW)
    assert any("will slow each other down" in warning for warning in said)
    assert any("a batch of 4 groups repeats prompts: the task has 3" in warning for warning in said)
    said = warnings(plan_for([GOOD] * 4), NEW)
    assert any("also trained on" in warning and "rows.jsonl:4, as in" in warning for warning in said)


def test_a_model_is_built_once_and_kept(plan_for: Planner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STRETTO_CACHE", str(tmp_path / "cache"))
    plan = plan_for(model={"build": SMALL.model_dump()})
    written = (plan.base.path / "model.safetensors").stat().st_mtime_ns
    assert plan.base.path.is_relative_to(tmp_path / "cache" / "models")
    assert base_folder(plan.recipe.model, plan.recipe.seed) == plan.base.path
    assert (plan.base.path / "model.safetensors").stat().st_mtime_ns == written
    assert base_folder(plan.recipe.model, seed=2) != plan.base.path


@pytest.mark.parametrize(
    ("sections", "published"),
    [
        ({}, None),
        ({"engine": {"dtype": "bfloat16"}}, "bfloat16"),
        ({"engine": {"dtype": "bfloat16"}, "trainer": {"lora": {}}}, None),
        ({"engine": {"dtype": "bfloat16", "kind": "sglang", "addresses": ["127.0.0.1:1"]}}, None),
    ],
    ids=["float32", "bfloat16", "adapters", "servers of others"],
)
def test_weights_are_published_in_the_dtype_that_all_engines_round_them_to(
    plan_for: Planner, tmp_path: Path, sections: Tree, published: str | None
) -> None:
    plan = plan_for()
    tree = plan.recipe.model_dump(mode="python", exclude_none=True)
    changed = {name: tree[name] | section for name, section in sections.items()}
    recipe = plan.recipe.model_validate(tree | changed)
    here = Endpoints("mailbox", tmp_path, tmp_path)
    assert trainer_spec(replace(plan, recipe=recipe), plan.base.path, here, tmp_path).published == published


def test_a_run_that_needs_far_more_memory_than_there_is_is_refused_with_both_numbers(
    plan_for: Planner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("stretto_app.extensions.preflight.estimates.available_memory", lambda: 1 << 28)
    told = r"memory: the run needs .*all 1\.\d\d GiB; available 0\.25 GiB; each rank .*; a smaller model"
    with pytest.raises(RecipeError, match=told):
        fitting(plan_for())


def test_the_digest_of_a_data_set_makes_no_copy_of_it() -> None:
    assert digest("a", 1, None) == "02abd0042da74356fb6c"  # which runs of earlier versions have on record
    rows = [f"{number}" * 100_000 for number in range(100)]
    tracemalloc.start()
    digest(*rows)
    assert tracemalloc.get_traced_memory()[1] < sum(map(len, rows)) / 10
    tracemalloc.stop()
