"""Promises of `stretto dpo`: it learns what it is shown, in a process of its own, and writes a folder; the reference
stays what it was; every mistake of the recipe and of the pairs is named with its place before anything starts.
"""

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from stretto.core.errors import DataError, ModelFolderError, RecipeError, RoleFailed, RunFolderError, StrettoError
from stretto.core.events import SupervisedProgress
from stretto.launch.recipe.recipe import to_toml
from stretto.model.hf.build import build_policy
from stretto.model.hf.config import BuildConfig
from stretto.model.hf.folder import load_policy
from stretto.model.hf.tokenizer import load_tokenizer
from stretto.model.packed.attention import PACKED_ATTENTION
from stretto.model.packed.logprobs import pack_tokens, token_logprobs
from stretto.trainer.optimizer import UNCHANGED
from stretto_app.extensions.commands.dpo import dpo
from stretto_app.extensions.commands.preferences import load_preferences
from tests.launch.warm import session_server
from tests.tolerances import near, operations_of

ROOT = Path(__file__).parents[2]
SHAPE = BuildConfig(hidden_size=16, layers=1, heads=2, kv_heads=1, head_dim=8, intermediate_size=32, context_length=16)
PAIRS = [{"prompt": f"{a}+{b}=", "chosen": str(a + b), "rejected": str(a + b + 1)} for a in range(4) for b in range(4)]
SETTINGS = "steps = 30\nbatch_size = 16\nlearning_rate = 1e-2\nbeta = 0.5\n"

Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """A recipe beside its model and its pairs."""
    build_policy(SHAPE, tmp_path / "policy", seed=1)

    def written(rows: Sequence[object] = PAIRS, settings: str = SETTINGS) -> Path:
        (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        recipe = tmp_path / "recipe.toml"
        recipe.write_text(f'[model]\npath = "policy"\n[preferences]\nfile = "pairs.jsonl"\n{settings}')
        return recipe

    return written


def log_ratio(folder: Path) -> float:
    """log p(chosen) - log p(rejected) of whole answers, on average over all pairs: how far a single one comes in 30
    steps depends on the rounding of the processor."""
    model, tokenizer = load_policy(folder, attention=PACKED_ATTENTION), load_tokenizer(folder)
    totals = []
    for row in PAIRS:
        for answer, sign in ((row["chosen"], 1), (row["rejected"], -1)):
            asked, said = tokenizer.encode(row["prompt"]), tokenizer.encode(answer, special_tokens=False)
            ids = asked + said + tokenizer.eos_token_ids[:1]
            packed = pack_tokens([ids], [range(len(asked), len(ids))])
            totals.append(sign * float(token_logprobs(model, packed, UNCHANGED).logprobs.sum().detach()))
    return sum(totals) / len(PAIRS)


def test_it_learns_to_prefer_and_leaves_the_base_alone(write: Write, tmp_path: Path) -> None:
    """And the generation settings, also those that transformers would not write."""
    seen: list[SupervisedProgress] = []
    settings = '{"eos_token_id": 1, "temperature": 0.6, "top_k": 20}'
    (tmp_path / "policy" / "generation_config.json").write_text(settings)
    dpo(write(), [], tmp_path / "out", seen.append, spawner=session_server())
    assert (tmp_path / "out" / "generation_config.json").read_text() == settings
    assert log_ratio(tmp_path / "out") > log_ratio(tmp_path / "policy") + 1
    assert (seen[-1].step, seen[-1].steps, seen[-1].phase, seen[-1].accuracy) == (30, 30, "preferences", 1.0)
    assert seen[-1].loss < 0.3
    assert {path.name for path in tmp_path.iterdir()} == {"policy", "pairs.jsonl", "recipe.toml", "out", "out.log"}


def test_another_reference_starts_with_another_loss(write: Write, tmp_path: Path) -> None:
    """Told of by the way: a pair that is longer than a micro-batch."""
    build_policy(SHAPE, tmp_path / "other", seed=2)
    seen, told = list[SupervisedProgress](), list[str]()
    for reference in ("policy", "other"):
        words = ["preferences.steps=1", f"preferences.reference={tmp_path / reference}"]
        words += ["preferences.micro_batch_tokens=11"]
        dpo(write(), words, tmp_path / f"from-{reference}", seen.append, told.append, session_server())
    longest = (
        "the longest pair has 12 tokens, more than preferences.micro_batch_tokens = 11: "
        "it is a micro-batch of its own and takes more memory"
    )
    assert told == [longest] * 2
    assert seen[0].loss == near(math.log(2), operations_of(SHAPE))
    assert seen[1].loss != near(math.log(2), operations_of(SHAPE))


GOOD = PAIRS[0]
BAD_ROWS: list[tuple[str, object, str]] = [
    ("a field that is missing", {"prompt": "1+1=", "chosen": "2", "rejcted": "3"}, "no field 'rejected'; did you mean"),
    ("an empty row", {}, "no field 'prompt'; the object is empty"),
    ("no object", [1], "[1] in place of an object"),
    ("a number", GOOD | {"chosen": 2}, "chosen: 2; a text is needed"),
    ("an empty answer", GOOD | {"rejected": " "}, 'rejected: " "; a text is needed'),
    ("twice the same", GOOD | {"rejected": GOOD["chosen"]}, "'chosen' and 'rejected' must differ"),
    ("a strange message", GOOD | {"prompt": [{"role": "usr", "content": "1"}]}, "did you mean 'user'?"),
    ("a strange letter", GOOD | {"chosen": "eleven"}, "cannot be encoded"),
    ("too long", GOOD | {"chosen": "1" * 20}, "16 fit"),
]


@pytest.mark.parametrize(("row", "told"), [case[1:] for case in BAD_ROWS], ids=[case[0] for case in BAD_ROWS])
def test_a_bad_row_is_named_with_its_line(write: Write, tmp_path: Path, row: object, told: str) -> None:
    with pytest.raises(DataError) as refused:
        dpo(write([GOOD, row]), [], tmp_path / "out", lambda _: None)
    assert str(refused.value).startswith(f"{tmp_path}/pairs.jsonl:2")
    assert told in str(refused.value)
    assert not (tmp_path / "out").exists()


def test_all_bad_rows_are_named_together(write: Write, tmp_path: Path) -> None:
    with pytest.raises(DataError) as refused:
        dpo(write([{}, GOOD, {"prompt": 3}]), [], tmp_path / "out", lambda _: None)
    assert [problem.place for problem in refused.value.problems] == [f"{tmp_path}/pairs.jsonl:{n}" for n in (1, 3)]


BAD_RECIPES: list[tuple[str, list[str], type[StrettoError], str]] = [
    ("an unknown key", ["preferences.betta=1.0"], RecipeError, "preferences.betta: unknown key; did you mean 'beta'?"),
    (
        "a section of a run",
        ["trainer.steps=3"],
        RecipeError,
        "override trainer.steps: unknown key; allowed: model, preferences, seed",
    ),
    ("wild steps", ["preferences.learning_rate=10"], RecipeError, "10; input should be less than or equal to 1"),
    ("no price", ["preferences.beta=0.0"], RecipeError, "preferences.beta: 0.0; input should be greater than 0"),
    ("no pairs", ["preferences.file=nowhere.jsonl"], DataError, "nowhere.jsonl: no such file"),
    ("no model", ["model.path=nowhere"], ModelFolderError, "model.path: "),
    ("no reference", ["preferences.reference=nowhere"], ModelFolderError, "preferences.reference: "),
    ("no GPU", ["preferences.device=cuda"], RecipeError, "preferences.device: 'cuda', and torch finds no GPU"),
]


@pytest.mark.parametrize(("overrides", "kind", "told"), [c[1:] for c in BAD_RECIPES], ids=[c[0] for c in BAD_RECIPES])
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU, so nothing is wrong with asking for it")
def test_a_bad_recipe_is_refused_before_anything_starts(
    write: Write, tmp_path: Path, overrides: list[str], kind: type[StrettoError], told: str
) -> None:
    with pytest.raises(kind) as refused:
        dpo(write(), overrides, tmp_path / "out", lambda _: None)
    assert told in str(refused.value)
    assert not (tmp_path / "out").exists()


def test_a_reference_with_another_vocabulary_is_refused(write: Write, tmp_path: Path) -> None:
    build_policy(SHAPE.model_copy(update={"alphabet": "0123"}), tmp_path / "other", seed=2)
    with pytest.raises(ModelFolderError, match=r"preferences\.reference needs a model with the policy's tokenizer"):
        dpo(write(), [f"preferences.reference={tmp_path / 'other'}"], tmp_path / "out", lambda _: None)


def test_a_folder_that_exists_is_not_touched(write: Write, tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match="exists already"):
        dpo(write(), [], tmp_path / "policy", lambda _: None)


def test_a_training_that_diverges_ends_with_its_reason(write: Write, tmp_path: Path) -> None:
    wild = ["preferences.learning_rate=1", "preferences.beta=1e38", "preferences.max_bad_steps=1"]
    with pytest.raises(RoleFailed, match="NaN or infinite gradients"):
        dpo(write(), wild, tmp_path / "out", lambda _: None, spawner=session_server())
    assert not (tmp_path / "out").exists()


def test_the_recipe_in_the_folder_reads_back_as_itself(tmp_path: Path) -> None:
    recipe = load_preferences(ROOT / "recipes" / "dpo.toml")
    (tmp_path / "again.toml").write_text(to_toml(recipe))
    assert load_preferences(tmp_path / "again.toml") == recipe
