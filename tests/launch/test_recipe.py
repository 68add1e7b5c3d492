"""Recipes.

- Every mistake is one sentence with the place, the value and what is allowed; all mistakes of a file come together.
- Mistakes of values that are given beside a recipe name the override, and none that stands in the file.
- A resolved recipe reads back as itself; differences between two recipes are named by key.
"""

import os
import tomllib
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.core.errors import RecipeError
from stretto.launch.recipe.recipe import _PATHS, Recipe, differences, load_recipe, parse_recipe, to_toml, validate
from stretto.rollout.workflow import WorkflowConfig
from stretto.store.files import unreplaced
from stretto.trainer.objective.corrections import CORRECTIONS

ROOT = Path(__file__).parents[2]
SMALL = """
[model]
path = "policy"
[task]
kind = "jsonl"
file = "rows.jsonl"
[trainer]
steps = 3
"""
#: One of each kind; the bounds and the words of each key are held by docs/reference/recipe.md (tests/test_docs.py).
BROKEN: list[tuple[str, str, Sequence[str]]] = [
    ("an unknown key", "[trainer]\nstep = 3", ["trainer.step: unknown key", "did you mean 'steps'?"]),
    ("an unknown section", "[trainor]\nsteps = 3", ["trainor: unknown key", "did you mean 'trainer'?"]),
    ("a key by another name", "[trainer]\nlr = 1e-4", ["trainer.lr: unknown key", "did you mean 'learning_rate'?"]),
    ("one of its section", "[rollout]\nnum_generations = 4", ["unknown key; did you mean 'group_size'?"]),
    ("a recipe of another command", "[preferences]\nbeta = 1", ["a recipe with preferences is one of `stretto dpo`"]),
    ("one of another section", "[algorithm]\nbeta = 0.1", ["did you mean 'algorithm.reference.weight'?"]),
    ("an algorithm for a loss", '[algorithm]\nloss = "grpo"',
     ["algorithm.loss: kind 'grpo' is unknown; allowed: 'decoupled_ppo', 'ppo', ", 'loss = "ppo" with advantages']),
    ("DAPO", '[algorithm]\nloss = "dapo"', ["kind 'dapo' is unknown", 'loss = { kind = "ppo", clip_high = 0.28 }']),
    ("a misspelt loss", '[algorithm]\nloss = "sappo"', ["kind 'sappo' is unknown", "did you mean 'sapo'?"]),
    ("an unknown key of a union", '[task]\nkind = "jsonl"\nfile = "x"\nhold_out = 3', ["task.hold_out", "'held_out'"]),
    ("an unknown key of nothing like it", "[engine]\nzzz = 1",
     ["engine.zzz", "allowed: addresses, arguments, base_port, batching, "]),
    ("a text for a number", '[trainer]\nsteps = "3"', ["trainer.steps: '3'", "valid integer"]),
    ("a fraction for a count", "[trainer]\nsteps = 3.5", ["trainer.steps: 3.5", "integer"]),
    ("a bool for a number", "[trainer]\nsteps = true", ["trainer.steps: True", "valid integer"]),
    ("a bool as text", '[algorithm]\nentropy = "true"', ["algorithm.entropy: 'true'", "valid boolean"]),
    ("a value for a section", "engine = 3", ["engine: 3", "a section is needed"]),
    ("out of range", "[trainer]\nlearning_rate = -1.0", ["trainer.learning_rate: -1.0", "greater than 0"]),
    ("not a number", "[trainer]\nlearning_rate = nan", ["trainer.learning_rate: nan", "finite number"]),
    ("an infinite deadline", "[deadlines]\nstep = inf", ["deadlines.step: inf", "finite number"]),
    ("a negative staleness", "[rollout]\nmax_staleness = -1",
     ["rollout.max_staleness: -1", "greater than or equal to 0"]),
    ("half a version", "[rollout]\nmax_staleness = 1.5", ["rollout.max_staleness", "whole number of versions, or inf"]),
    ("staleness by itself, misspelt", '[rollout]\nmax_staleness = "atuo"',
     ["rollout.max_staleness: 'atuo'", "valid number or 'auto'"]),
    ("bounds in the wrong order", '[rollout]\nmax_staleness = "auto"\nstaleness_min = 9',
     ["rollout: staleness_min = 9 is more than staleness_max = 8", "lower the first"]),
    ("no staleness", "[rollout]\nmax_staleness = nan", ["rollout.max_staleness: nan"]),
    ("groups in flight between bounds in the wrong order", '[rollout]\nmax_in_flight = "auto"\nmax_in_flight_min = 300',
     ["rollout: max_in_flight_min = 300 is more than max_in_flight_max = 256", "lower the first"]),
    ("groups in flight by themselves in a run that can be repeated",
     '[rollout]\nmax_in_flight = "auto"\nmax_staleness = 0',
     ['rollout.max_in_flight = "auto" follows what the engines tell', "give a number"]),
    ("an unknown word", '[rollout]\nbeyond_bound = "drop"',
     ["beyond_bound: 'drop'", "'train', 'wait', 'mask' or 'expire'"]),
    ("an unknown task", '[task]\nkind = "chess"', ["task", "'chess'", "'arithmetic', 'dataset', 'jsonl'"]),
    ("a task of no kind", "[task]\nfile = 'x'", ["task", "kind"]),
    ("a missing file name", '[task]\nkind = "jsonl"', ["task.file: missing"]),
    ("model and build", "[model.build]\nlayers = 1", ["model: give either model.path or [model.build]"]),
    ("a heads mismatch", "[model]\n[model.build]\nheads = 3\nkv_heads = 2", ["kv_heads = 2 does not divide heads = 3"]),
    ("more minibatches than answers", "[rollout]\nbatch_size = 1\ngroup_size = 2",
     ["minibatches = 4 is more than the 2"]),
    ("groups of one, filtered", '[rollout]\ngroup_size = 1\nfilter = "zero_variance"',
     ["group_size = 1", 'filter = "none"']),
    ("groups of one, compared", "[rollout]\ngroup_size = 1", ["every advantage zero", 'advantages = "batch"']),
    ("a number of another loss", '[algorithm]\nloss = { kind = "sapo", clip_high = 0.3 }',
     ["algorithm.loss.clip_high: unknown key"]),
    ("an anchor that a loss does not have", '[algorithm]\nloss = { kind = "decoupled_ppo", anchor = "behavior" }',
     ["algorithm.loss.anchor: 'behavior'", "'recomputed' or 'interpolated'"]),
    ("a correction of nothing", '[algorithm]\nloss = "ppo"\ncorrection = { kind = "mask", low = 0.5, high = 2.0 }',
     ['algorithm: loss "ppo"', 'correction "mask" does nothing', 'anchor = "recomputed", or remove the correction']),
    ("a buffer longer than the answers", "[sampling]\nmax_tokens = 16\n[algorithm.shaping]\noverlong_buffer = 17",
     ["algorithm.shaping.overlong_buffer = 17 is more than sampling.max_tokens = 16"]),
    (
        "answers that are filtered and bootstrapped",
        '[rollout]\ntruncated = "filter"\n'
        '[algorithm]\nadvantages = { kind = "gae", critic = { truncated = "bootstrap" } }',
        ['rollout.truncated = "filter"', 'critic.truncated = "bootstrap" would do nothing', 'critic.truncated = "end"'],
    ),
    ("a reference in a place that is none", '[algorithm]\nreference = { into = "rewards" }',
     ["algorithm.reference.into: 'rewards'", "'loss' or 'reward'"]),
    ("success rates that exclude each other", "[rollout]\nsuccess_rate_min = 0.9\nsuccess_rate_max = 0.1",
     ["rollout.success_rate_min = 0.9 is more than rollout.success_rate_max = 0.1"]),
    ("too many decided", "[rollout]\nmin_group_size = 9", ["min_group_size = 9 is more than rollout.group_size = 8"]),
    ("a word that is nearly one", '[engine]\nkind = "vlm"',
     ["recipe.toml: engine.kind: 'vlm'; input should be 'native', 'vllm' or 'sglang'; did you mean 'vllm'?"]),
    ("a word that is nearly one, where a number may be too", '[trainer]\nkeep_versions = "al"',
     ["recipe.toml: trainer.keep_versions: 'al'; input should be 'all' or a valid integer"]),
    ("a Ray cluster that is no address", '[cluster]\nray = "atuo"',
     ["recipe.toml: cluster.ray: 'atuo'; allowed: auto, local or HOST:PORT; did you mean 'auto'?"]),
    ("too few policies", "[trainer]\nkeep_versions = 0",
     ["trainer.keep_versions: 0; input should be 'all' or greater than or equal to 1"]),
    ("a nucleus that is no number", "[sampling]\ntop_p = nan", ["sampling.top_p: nan", "finite"]),
    ("an empty stop text", '[sampling]\nstop = ["a", ""]', ["sampling.stop.1: ''", "at least 1 character"]),
    ("too many stop texts", f"[sampling]\nstop = {['a'] * 65}", ["sampling.stop", "at most 64 items"]),
    ("a stop that is no text", "[sampling]\nstop = [7]", ["sampling.stop.0: 7", "valid string"]),
    ("a number beyond floats", "[trainer]\nlearning_rate = 1e400", ["trainer.learning_rate: inf", "finite number"]),
    ("a patience without end", "[deadlines]\nhung = nan", ["deadlines.hung: nan", "finite number"]),
    ("a table that is a list", "[[engine]]\ncount = 1", ["engine: [{'count': 1}]", "a section is needed"]),
    ("a date for a number", "[trainer]\nsteps = 2025-01-01", ["trainer.steps", "valid integer"]),
    ("a right worth nothing", "[rewards]\nright = 0.0", ["rewards: right (0) must be greater than wrong (0)"]),
]  # fmt: skip


def write(folder: Path, text: str | bytes) -> Path:
    path = folder / "recipe.toml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def merged(text: str) -> str:
    """`SMALL` with sections replaced or added."""
    sections = {part.partition("]")[0]: "[" + part for part in SMALL.split("[") if part.strip()}
    head, *parts = text.split("\n[") if not text.startswith("[") else ["", *("\n" + text).split("\n[")[1:]]
    keep = [body for name, body in sections.items() if not any(part.startswith(f"{name}]") for part in parts)]
    return "\n".join([head, *("[" + part for part in parts), *keep])


def message(path: Path, overrides: Sequence[str] = ()) -> str:
    with pytest.raises(RecipeError) as caught:
        load_recipe(path, overrides)
    assert caught.value.exit_code == 2
    return str(caught.value)


@pytest.mark.parametrize(("text", "expected"), [case[1:] for case in BROKEN], ids=[case[0] for case in BROKEN])
def test_a_mistake_is_named_with_place_value_and_remedy(tmp_path: Path, text: str, expected: Sequence[str]) -> None:
    path = write(tmp_path, merged(text))
    told = message(path)
    assert told.startswith(f"{path}: ")
    assert len(told.splitlines()) == 1
    assert not [part for part in expected if part not in told], told


def test_a_missing_section_is_named_unless_all_of_its_keys_have_defaults(tmp_path: Path) -> None:
    assert message(write(tmp_path, "seed = 1")).splitlines() == [
        f"{tmp_path}/recipe.toml: {section}: missing" for section in ("model", "task")
    ]


def test_all_mistakes_of_a_file_come_together(tmp_path: Path) -> None:
    told = message(write(tmp_path, merged("[trainer]\nsteps = 0\neps = -1.0\n[engine]\nslot = 3\n")))
    assert len(told.splitlines()) == 3


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (b"", "is empty"),
        (b"\n  \n", "is empty"),
        (b"seed = \xff", "cannot be read"),
        (b"\x1f\x8b\x08\x00", "cannot be read"),
        (b"seed = 1\n[model\n", "line 2, column 7"),
        (b"seed = 1\nseed = 2\n", "broken TOML: Cannot overwrite a value (at line 2"),
        (b"seed = 1 2", "broken TOML"),
        *[(b"a = " + b"[" * 5000, "broken TOML"), (b"seed = " + b"1" * 5000, "broken TOML: Exceeds the limit")],
        (b"# " + b"x" * (1 << 20), "less than 1 MiB"),
    ],
)
def test_a_file_that_is_no_recipe_is_refused(tmp_path: Path, text: bytes, expected: str) -> None:
    path = write(tmp_path, text)
    assert message(path).startswith(f"{path}: ")
    assert expected in message(path)


def test_a_recipe_that_is_not_there_is_refused_with_the_nearest_name(tmp_path: Path) -> None:
    write(tmp_path, SMALL)
    assert message(tmp_path / "recipes.toml") == f"{tmp_path}/recipes.toml: no such file; did you mean 'recipe.toml'?"
    assert "is a folder" in message(tmp_path)
    os.mkfifo(tmp_path / "pipe.toml")
    assert "is a device, a pipe or a socket" in message(tmp_path / "pipe.toml")
    (tmp_path / "link.toml").symlink_to("nowhere")
    assert message(tmp_path / "link.toml").endswith(": is a link to nothing")


def test_a_byte_order_mark_and_windows_ends_of_lines_do_no_harm(tmp_path: Path) -> None:
    assert load_recipe(write(tmp_path, b"\xef\xbb\xbf" + SMALL.replace("\n", "\r\n").encode())).trainer.steps == 3


def test_overrides_replace_values_and_take_words_without_quotes(tmp_path: Path) -> None:
    overrides = [
        "trainer.steps=7",
        "rollout.beyond_bound=wait",
        "rollout.max_staleness=inf",
        "trainer.learning_rate=1e-5",
    ]
    recipe = load_recipe(write(tmp_path, SMALL), overrides)
    assert (recipe.trainer.steps, recipe.rollout.beyond_bound) == (7, "wait")
    assert (recipe.rollout.max_staleness, recipe.trainer.learning_rate) == (float("inf"), 1e-5)


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("trainer.steps", "'trainer.steps': not of the form section.key=value"),
        ("=3", "not of the form"),
        ("trainer..steps=3", "not of the form"),
        ("trainer.step=3", "trainer.step: unknown key; did you mean 'steps'?"),
        ("TRAINER.steps=3", "override TRAINER.steps: unknown key; did you mean 'trainer'?"),
        ("workflow.function=3", "override workflow.function: 3; input should be a valid string"),
        ("model.path=\0", "override model.path: '\\x00'; is no path: embedded null byte"),
        ("seed.more=3", "seed is a value, not a section"),
        ("trainer.steps=many", "trainer.steps: 'many'"),
        ("trainer.steps=", "trainer.steps: ''"),
        ("algorithm.entropy=True", "algorithm.entropy: 'True'"),
        *[("seed=" + "1" * 5000, "override seed: '1111"), ("algorithm.loss=" + "[" * 5000, "override algorithm.loss")],
        ("trainer.steps=3\nseed=4", "override trainer.steps: "),  # not 3 steps, without a word about the seed
        *[("logging.to=[[1]]", "override logging.to"), ("logging.tags=[{}]", "override logging.tags")],
    ],
)
def test_an_override_that_makes_no_sense_is_refused(tmp_path: Path, override: str, expected: str) -> None:
    assert expected in message(write(tmp_path, "seed = 1\n" + SMALL), [override])


def test_an_override_removes_no_setting_of_ones_own_that_is_called_like_a_key_of_the_model(tmp_path: Path) -> None:
    own = '[workflow]\nfunction = "m:W"\n[workflow.settings]\nbuild = "fast"\nfunctions = 3\n'
    for settings in (["workflow.settings.path=x"], {"workflow": {"settings": {"path": "x", "function": "f"}}}):
        found = load_recipe(write(tmp_path, merged(own)), settings).workflow
        assert isinstance(found, WorkflowConfig)
        assert {"build": "fast", "functions": 3, "path": "x"}.items() <= found.settings.items()


def test_the_path_of_a_reference_is_relative_to_the_recipe_too(tmp_path: Path) -> None:
    recipe = load_recipe(write(tmp_path, merged('[algorithm.reference]\npath = "other"')))
    assert recipe.algorithm.reference is not None
    assert recipe.algorithm.reference.path == str(tmp_path / "other")
    assert load_recipe(write(tmp_path, to_toml(recipe))) == recipe


def test_a_choice_may_be_a_name_or_a_section(tmp_path: Path) -> None:
    by_name = load_recipe(write(tmp_path, merged('[algorithm]\nloss = "gspo"\nadvantages = "gae"')))
    by_section = load_recipe(
        write(tmp_path, merged('[algorithm.loss]\nkind = "gspo"\n[algorithm.advantages]\nkind = "gae"'))
    )
    assert by_name == by_section
    assert load_recipe(write(tmp_path, SMALL), ["algorithm.loss=gspo", "algorithm.advantages=gae"]) == by_name
    assert load_recipe(write(tmp_path, to_toml(by_name))) == by_name


def test_paths_are_relative_to_the_recipe(tmp_path: Path) -> None:
    recipe = load_recipe(write(tmp_path, SMALL))
    assert recipe.model.path == str(tmp_path / "policy")
    assert recipe.model_dump()["task"]["file"] == str(tmp_path / "rows.jsonl")


RUNS = sorted(path for path in (ROOT / "recipes").glob("*.toml") if path.stem != "dpo")  # which is no run


@pytest.mark.parametrize("path", RUNS, ids=lambda path: path.stem)
def test_a_resolved_recipe_reads_back_as_itself(tmp_path: Path, path: Path) -> None:
    recipe = load_recipe(path)
    assert load_recipe(write(tmp_path, to_toml(recipe))) == recipe


texts = st.text(st.characters(codec="utf-8"), min_size=1)
numbers = st.floats(min_value=0, max_value=1e6, exclude_min=True)


@given(path=texts, right=numbers, seed=st.integers(0, 2**63 - 1), staleness=st.just(float("inf")) | st.integers(0, 9))
def test_any_value_survives_the_way_through_toml(path: str, right: float, seed: int, staleness: float) -> None:
    tree = {
        "seed": seed,
        "model": {"path": path},
        "task": {"kind": "arithmetic", "prompts": 64, "demonstrations": 0},
        "trainer": {},
        "rewards": {"function": path, "right": right},
        "rollout": {"max_staleness": staleness},
    }
    recipe = validate(tree, "here")
    assert validate(tomllib.loads(to_toml(recipe)), "there") == recipe


def test_differences_are_named_by_key_except_those_that_may_differ(tmp_path: Path) -> None:
    old = load_recipe(write(tmp_path, SMALL))
    new = load_recipe(write(tmp_path, SMALL), ["seed=2", "trainer.steps=9", "deadlines.step=5", "engine.count=2"])
    assert differences(old, new, ("trainer.steps", "deadlines")) == [
        ("engine.count", "was 1 and is 2"),
        ("seed", "was 1 and is 2"),
    ]
    assert differences(old, old) == []


def test_the_tables_of_a_recipe_can_be_had_before_they_are_checked(tmp_path: Path) -> None:
    tree = parse_recipe(write(tmp_path, SMALL), ["engine.slot=3"])
    assert tree["engine"] == {"slot": 3}
    with pytest.raises(RecipeError, match="did you mean 'slots'"):
        validate(tree, "here")


def test_a_recipe_cannot_be_changed(tmp_path: Path) -> None:
    recipe: Recipe = load_recipe(write(tmp_path, SMALL))
    with pytest.raises(ValueError, match="frozen"):
        recipe.seed = 3  # type: ignore[misc]


def test_a_table_on_the_command_line_changes_the_keys_that_it_names() -> None:
    arithmetic = ROOT / "recipes" / "arithmetic.toml"
    before, after = (
        load_recipe(arithmetic),
        load_recipe(arithmetic, ["trainer={steps=1}", "algorithm.correction={high=3.0}"]),
    )
    assert [key for key, _ in differences(before, after)] == ["algorithm.correction.high", "trainer.steps"]
    other = load_recipe(arithmetic, ['algorithm.correction={kind="truncate"}'])  # of another kind: its own defaults
    assert other.algorithm.correction == CORRECTIONS("truncate", high=2.0)


def test_a_mistake_of_an_override_is_named_by_the_override(tmp_path: Path) -> None:
    path = write(tmp_path, merged("[engine]\nslot = 3\n"))
    overrides = ["trainer.step=3", "task.held_out=0", "trainer.steps=7", "engine={ slots = 0 }"]
    told = message(path, overrides).splitlines()
    assert sorted(line.partition("; ")[0] for line in told) == [
        f"{path}: engine.slot: unknown key",
        "override engine.slots: 0",
        "override task.held_out: 0",
        "override trainer.step: unknown key",
    ]
    with pytest.raises(RecipeError, match=r"^override trainer\.step: unknown key; did you mean 'steps'\?$"):
        load_recipe(write(tmp_path, SMALL), {"trainer": {"step": 3}})


def test_a_mistake_of_several_keys_names_the_override_of_one_of_them(tmp_path: Path) -> None:
    path = write(tmp_path, SMALL)
    told = message(path, ["trainer.steps=7", "trainer.minibatches=1000"])
    assert told.startswith(f"{path} with override trainer.minibatches: trainer.minibatches = 1000 is more than")
    told = message(path, ["rollout.max_staleness=auto", "rollout.staleness_min=9"])
    assert told.startswith(f"{path}: rollout with override rollout.staleness_min: staleness_min = 9 is more than")


@pytest.mark.parametrize("key", [*_PATHS, "data"])
def test_a_variable_that_no_shell_has_replaced_is_no_part_of_a_path(tmp_path: Path, key: str) -> None:
    sources = '[task]\nkind = "dataset"\nsources = [{ data = "$HOME/x" }]\n'
    path = write(tmp_path, sources if key == "data" else "seed = 1\n")
    told = message(path, [] if key == "data" else [f"{key}=$HOME/x"])
    assert f"{key}: '$HOME/x'; only a shell replaces $HOME: write {os.environ['HOME']}/x" in told
    (tmp_path / "$HOME").mkdir()
    assert "only a shell" not in message(write(tmp_path, 'path = "$HOME"\n'))  # there is one of that name
    assert unreplaced("cost$5/${a b}/$", Path("gone")) == ""  # these are no variables
