"""What the other commands do when all is well, and how a run deals with rewards that are not.

- `sft` and `dpo` write a folder that transformers loads; `eval` of one folder gives one accuracy; `inspect` and
  `export` read any run.
- An undecided answer is failed with its reason and is never a zero; rewards that decide nothing end the run.
- recipes/from_hf.toml trains a Hugging Face folder of any make on questions from a file.
"""

import asyncio
import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import ByteLevelBPETokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, PreTrainedTokenizerFast, Qwen2Config

from stretto.launch.assemble.supervised import warm_start
from stretto.launch.preflight.plan import make_plan
from stretto.launch.recipe.recipe import Recipe, load_recipe
from stretto_report.reading.inspection import inspect_run
from tests.launch.running import ROOT, TINY, Ended, Laboratory
from tests.tiny_policy import sized

Door = Callable[..., Ended]
WARM = "warm_start.steps=2"
FROM_HF = ROOT / "recipes" / "from_hf.toml"
WORD_PROBLEMS = ROOT / "recipes" / "data" / "word_problems.jsonl"
CHAT_TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerFast:
    """Byte-level, made on the spot from the questions."""
    backend = ByteLevelBPETokenizer()
    backend.train([str(WORD_PROBLEMS)], vocab_size=400, special_tokens=["<pad>", "<s>", "</s>"], show_progress=False)
    backend.save(str(tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"))
    whole = PreTrainedTokenizerFast(
        tokenizer_object=backend._tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    )
    whole.chat_template = CHAT_TEMPLATE
    return whole


@pytest.fixture(scope="module")
def llama(tokenizer: PreTrainedTokenizerFast, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(LlamaConfig, tokenizer, tmp_path_factory.mktemp("llama") / "policy")


def saved(kind: type[LlamaConfig] | type[Qwen2Config], tokenizer: PreTrainedTokenizerFast, folder: Path) -> Path:
    """A tiny model of another make, as its author would save it."""
    shape = sized(400, width=32, inner=64, layers=2, heads=(4, 2), max_position_embeddings=256)
    config = kind(**shape, bos_token_id=1, eos_token_id=2, pad_token_id=0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def accuracy(ended: Ended) -> float:
    return float(json.loads(ended.well())["accuracy"])


def test_sft_writes_a_folder_and_eval_measures_it(door: Door, tmp_path: Path) -> None:
    out = tmp_path / "policy"
    elsewhere = ("engine.kind=sglang", "weights.medium=broadcast", "cluster.placer=ray")  # nothing of it is needed
    printed = door("sft", TINY, out, "warm_start.steps=30", "warm_start.batch_size=16", *elsewhere).well()
    assert f"policy written to {out}" in printed
    assert AutoModelForCausalLM.from_pretrained(out).config.vocab_size == len(AutoTokenizer.from_pretrained(out))
    measured = accuracy(door("eval", out, "--task", TINY, "--json"))
    assert 0 <= accuracy(door("eval", out, "--task", TINY, "--json", "rewards.function=exact_match")) < measured
    assert sorted(path.name for path in tmp_path.iterdir()) == ["policy", "policy.log"]


def test_dpo_writes_a_folder_and_says_how_it_went(door: Door, llama: Path, tmp_path: Path) -> None:
    out = tmp_path / "policy"
    small = ["preferences.steps=2", "preferences.batch_size=4", "preferences.learning_rate=1e-3"]
    printed = door("dpo", ROOT / "recipes" / "dpo.toml", out, f"model.path={llama}", *small).well()
    assert "preferences 2/2" in printed
    assert "accuracy" in printed
    assert f"policy written to {out}" in printed
    assert AutoModelForCausalLM.from_pretrained(out).config.model_type == "llama"


def test_eval_asks_all_rows_of_a_file_and_says_it_in_words(door: Door, llama: Path, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(WORD_PROBLEMS.read_text().splitlines(keepends=True)[:24]))
    ended = door("eval", llama, "--task", rows)
    assert ended.code == 0, ended.err
    assert "at most 128 tokens" in ended.out + ended.err  # half of the context
    assert "of 24 right" in ended.out


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        ("hanging", "less than 0.1 s of processor time"),
        pytest.param("not_a_number", "not_a_number returned nan", marks=pytest.mark.long),
    ],
)
def test_a_reward_that_decides_nothing_ends_with_why(door: Door, tmp_path: Path, function: str, reason: str) -> None:
    run_dir = tmp_path / "run"
    settings = ["rewards.timeout=0.1", "rewards.max_consecutive_undecided=2"]
    function = f"rewards.function=tests.launch.rewards_for_tests:{function}"
    ended = door("train", TINY, function, *settings, "--run-dir", run_dir)
    ended.refused("rewards.function: the last", "completions were undecided", reason, "max_consecutive_undecided")
    (count,) = re.findall(r"the last (\d+) completions were undecided", ended.err)
    assert int(count) >= 2  # verdicts of other workers may arrive before the run ends
    assert "failed: rewards.function" in (run_dir / "log.txt").read_text()


def test_an_undecided_answer_is_failed_and_never_a_zero(
    door: Door, laboratory: Laboratory, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("STRETTO_CACHE", str(laboratory.cache))
    run_dir, file = tmp_path / "run", tmp_path / "out.jsonl"
    function = "rewards.function=tests.launch.rewards_for_tests:now_and_then"
    patient = "rewards.max_consecutive_undecided=1000"
    door("train", TINY, function, patient, WARM, "trainer.steps=3", "--run-dir", run_dir).well()
    assert door("export", run_dir, file).code == 0
    assert door("export", run_dir).out == door("export", run_dir, "-").out == file.read_text()
    trajectories = [json.loads(line) for line in file.read_text().splitlines()]
    undecided = [t for t in trajectories if t["verdict"] == "undecided"]
    assert undecided
    assert all(t["state"] == "failed" and t["reward"] is None for t in undecided)
    [reason] = {t["reason"] for t in undecided}
    assert reason.startswith("the reward raised ValueError in ")
    assert reason.endswith(": a length divisible by five")
    assert (run_dir / "log.txt").read_text().count("a completion is undecided: the reward raised ValueError") == 1
    assert all(len(t["text"]) % 5 for t in trajectories if t["state"] == "trained")
    assert inspect_run(run_dir).trajectories.failed == len(undecided)
    assert_learnt_once(run_dir, load_recipe(TINY, [function, patient, WARM]))


def assert_learnt_once(run_dir: Path, recipe: Recipe) -> None:
    """The warm start of that run is kept: asked for again, it is there at once, and it is version 0."""

    def surprised(learning: object) -> None:
        raise AssertionError("it was learnt already")

    kept = asyncio.run(warm_start(make_plan(recipe), run_dir / "log.txt", surprised))
    assert (run_dir / "policy" / "v000000" / "config.json").read_text() == (kept / "config.json").read_text()


def test_any_hugging_face_folder_is_trained_on_questions_from_a_file(door: Door, llama: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    # A model that knows nothing is never right; its answers are told apart by something else.
    reward = "rewards.function=tests.launch.rewards_for_tests:length"
    small = ["trainer.steps=2", "sampling.max_tokens=12", "evaluation.prompts=8", "rollout.batch_size=2"]
    door("train", FROM_HF, f"model.path={llama}", reward, *small, "--run-dir", run_dir).well()
    assert inspect_run(run_dir).steps == 2
    trained = AutoModelForCausalLM.from_pretrained(run_dir / "policy" / "v000002")
    assert trained.config.model_type == "llama"
    before = AutoModelForCausalLM.from_pretrained(llama)
    assert any((a != b).any() for a, b in zip(trained.parameters(), before.parameters(), strict=True))
    assert AutoTokenizer.from_pretrained(run_dir / "policy" / "v000002").chat_template == CHAT_TEMPLATE


def test_chats_are_rendered_by_the_folders_template(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    folder = saved(Qwen2Config, tokenizer, tmp_path / "qwen")
    rows = tmp_path / "rows.jsonl"
    row = {"prompt": [{"role": "user", "content": "How many?"}], "answer": 3}
    rows.write_text(f"{json.dumps(row)}\n" * 2)
    plan = make_plan(load_recipe(FROM_HF, [f"model.path={folder}", f"task.file={rows}", "task.held_out=1"]))
    assert plan.tokenizer.decode(plan.training[0].token_ids) == "<user>How many?<assistant>"


def test_the_recipe_without_a_model_says_what_is_needed(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/nowhere")
    ended = door("train", FROM_HF, "--dry-run")
    ended.refused("model.path: /nowhere/models/policy: no such folder; a Hugging Face model folder is needed\n")


def test_paths_on_the_command_line_are_relative_to_where_one_is(
    door: Door, llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(llama.parent)
    out = door("train", FROM_HF, "model.path=policy", "--dry-run").well()
    assert f"{llama}: LlamaForCausalLM" in out
    assert "176 for training, 64 held out" in out
