"""A recipe with sources, and with several rewards, some of them for some sources.

- What is wrong is named with its source; prompts keep within their limit by the chosen policy; a run has its data and
  their order on record, which a resume may not change.
- Each reward is measured by its name, in metrics, samples, the summary of the run and its export; a source has the
  rewards that name it and those for all; mistakes (an unknown source, a source without a reward, a function that is not
  there) end the start with their places; gold answers are read by the rewards of their source alone.
- Files that are not there come together, each with its key in the recipe and the nearest name there.
- A recipe reads back as itself.
"""

import json
import shutil
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from stretto.core.errors import DataError, RecipeError, RunFolderError, UserError
from stretto.launch.preflight.paths import check_data_files, data_files
from stretto.launch.preflight.plan import Plan, make_plan
from stretto.launch.recipe.overrides import Overrides, with_named_reward
from stretto.launch.recipe.recipe import load_recipe, to_toml, validate
from stretto.launch.recorded import DATA, DataRecord
from stretto.launch.train import prepare
from stretto.rewards.config import RewardPart, RewardsConfig
from stretto.rewards.service.wire import Row
from stretto.rollout.prompts import PromptSource
from stretto.rollout.questions import Question
from stretto.store.config import StoreConfig
from stretto.store.ledger.ledger import Ledger
from stretto.store.series.metrics import SetEvaluationLine, read_evaluations, read_metrics
from stretto_app.extensions.commands.plan import job_of
from stretto_app.extensions.preflight.trial import try_reward
from stretto_report.audit.check import check_run
from stretto_report.dashboard.terminal.summary import print_inspection
from stretto_report.reading.export import read_trajectories
from stretto_report.reading.inspection import inspect_run
from tests.launch.rewards_for_tests import length, slow
from tests.launch.running import Laboratory

RECIPE = """
[model]
path = "policy"
[task]
kind = "dataset"
[[task.sources]]
data = "short.jsonl"
weight = 1.0
held_out = 1
[[task.sources]]
data = "long.csv"
prompt_field = "question"
weight = 2.0
[sampling]
max_tokens = 8
[rollout]
batch_size = 2
group_size = 2
max_staleness = 0
[trainer]
steps = 3
learning_rate = 1e-4
[evaluation]
prompts = 1
"""

SET = """
[[evaluation.sets]]
name = "sums"
source = { data = "short.jsonl" }
prompts = 2
samples = 3
every = 3
"""


REWARDS = """
[[rewards.functions]]
name = "number"
function = "last_number"
sources = ["short"]
[[rewards.functions]]
name = "word"
function = "exact_match"
sources = ["long"]
[[rewards.functions]]
function = "own_rewards:shortness"
weight = 0.5
"""
MODULE = """
def shortness(prompt, completion, answer):
    return 1 / (1 + len(completion))
"""
EVEN = RECIPE.replace("weight = 1.0\n", "").replace("weight = 2.0\n", "")
pytestmark = pytest.mark.usefixtures("untried")


def sealed(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def recipe(tmp_path: Path, policy: Path) -> Path:
    shutil.copytree(policy, tmp_path / "policy")
    short = [{"prompt": f"{n}+1=", "answer": n + 1} for n in range(4)]
    (tmp_path / "short.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in short))
    (tmp_path / "long.csv").write_text("question,answer\n" + "".join(f"{n}+{n}+{n}+1={n},{n}\n" for n in range(8)))
    (tmp_path / "recipe.toml").write_text(RECIPE)
    return tmp_path / "recipe.toml"


@pytest.fixture
def rewarded(recipe: Path) -> Path:
    """With several rewards; the answers of the second source are no numbers."""
    (recipe.parent / "long.csv").write_text("question,answer\n" + "".join(f"{n}=,{'+' * n}\n" for n in range(1, 9)))
    (recipe.parent / "own_rewards.py").write_text(MODULE)
    recipe.write_text(EVEN + REWARDS)
    return recipe


def told(recipe: Path, text: str) -> list[str]:
    recipe.write_text(text)
    with pytest.raises(UserError) as caught:
        make_plan(load_recipe(recipe))
    return str(caught.value).splitlines()


def planned(recipe: Path, *overrides: str) -> Plan:
    return make_plan(load_recipe(recipe, overrides))


def test_sources_are_found_beside_the_recipe_and_keep_their_names_and_weights(recipe: Path) -> None:
    plan = planned(recipe)
    assert plan.sources == (PromptSource("short", 3, 1.0), PromptSource("long", 8, 2.0))
    assert [prompt.id for prompt in plan.held_out] == ["short:4"]
    assert plan.origins[3] == (f"{recipe.parent}/long.csv:2", "long")


def test_a_recipe_with_sources_reads_back_as_itself(recipe: Path) -> None:
    whole = load_recipe(recipe)
    recipe.write_text(to_toml(whole))
    assert load_recipe(recipe) == whole


def test_the_name_of_a_hub_dataset_is_no_path(recipe: Path) -> None:
    recipe.write_text(RECIPE.replace("long.csv", "openai/gsm8k"))
    sources: Any = load_recipe(recipe).model_dump()["task"]["sources"]
    assert [source["data"] for source in sources] == [f"{recipe.parent}/short.jsonl", "openai/gsm8k"]


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("weight = 2.0", "wieght = 2.0", "task.sources.1.wieght: unknown key; did you mean 'weight'?"),
        ("weight = 2.0", "", "source 'long' has no weight and others have one"),
        ("weight = 2.0", "weight = 0.0", "task.sources.1.weight: 0.0; input should be greater than 0"),
        ('data = "long.csv"', "", "task.sources.1.data: missing"),
        ('kind = "dataset"', 'kind = "dataset"\nlong_prompts = "drop_"', "task.long_prompts: 'drop_'"),
        ('data = "long.csv"', 'kind = "gym"', "allowed: 'rows', 'reasoning_gym'"),
        (
            'kind = "dataset"',
            'kind = "dataset"\ncurriculum = { easy = 0.5, hard = 0.5 }',
            "task.curriculum: hard = 0.5",
        ),
    ],
)
def test_a_mistake_of_a_source_is_named_with_its_place(recipe: Path, old: str, new: str, expected: str) -> None:
    (line,) = told(recipe, RECIPE.replace(old, new))
    assert line.startswith(f"{recipe}: ")
    assert expected in line


def test_the_mistakes_of_the_task_and_of_further_evaluations_come_together(recipe: Path) -> None:
    (recipe.parent / "long.csv").write_text("question,answer\n,4\n")
    (recipe.parent / "far.jsonl").write_text('{"prompt": 4}\n')
    lines = told(recipe, RECIPE + SET.replace("short.jsonl", "far.jsonl"))
    places = [f"{recipe.parent}/long.csv:2", *[f"{recipe.parent}/far.jsonl:1"] * 2]  # no answer, and a number as prompt
    assert [line.split(": ")[0] for line in lines] == places


def test_prompts_beyond_the_limit_are_refused_with_their_places(recipe: Path) -> None:
    lines = told(recipe, RECIPE.replace('kind = "dataset"', 'kind = "dataset"\nmax_prompt_tokens = 5'))
    assert len(lines) == 8
    assert lines[0].startswith(f"{recipe.parent}/long.csv:2: a prompt of 9 tokens; at most 5 fit")


def test_prompts_beyond_the_limit_are_left_out_and_counted(recipe: Path) -> None:
    rows = recipe.parent / "long.csv"
    rows.write_text(rows.read_text() + "1=,1\n2=,2\n")
    plan = planned(recipe, "task.max_prompt_tokens=5", "task.long_prompts=drop")
    assert plan.sources == (PromptSource("short", 3, 1.0), PromptSource("long", 2, 2.0))
    assert plan.notes[0] == (
        f"8 of 13 prompts (for training) are longer than 5 tokens; the first is {rows}:2: they are left out"
    )


def test_a_plan_knows_of_no_prompt_that_the_run_leaves_out(recipe: Path) -> None:
    """The longest that is left has 4 tokens; completions have 8."""
    limits = ["task.max_prompt_tokens=5", "task.long_prompts=drop"]
    rows = recipe.parent / "long.csv"
    rows.write_text(rows.read_text() + "1=,1\n2=,2\n")
    longest = max(len(prompt.token_ids) for prompt in planned(recipe, *limits).training)
    assert job_of(recipe, limits, "constant:tokens=8", lambda text: None).longest == longest + 8 <= 13


def test_where_no_prompt_is_left_the_filter_and_its_count_are_told(recipe: Path) -> None:
    limit = 'kind = "dataset"\nmax_prompt_tokens = 1\nlong_prompts = "drop"'
    (line,) = told(recipe, RECIPE.replace('kind = "dataset"', limit))
    assert "11 of 11 prompts (for training) are longer than 1 token" in line
    assert "none is left" in line
    (line,) = told(recipe, RECIPE.replace('kind = "dataset"', limit.replace("= 1\n", "= 4\n")))
    assert "no question of source 'long' is left, which has a weight" in line


def test_prompts_beyond_the_limit_lose_their_first_tokens(recipe: Path) -> None:
    plan = planned(recipe, "task.max_prompt_tokens=3", "task.long_prompts=truncate")
    assert [len(prompt.token_ids) for prompt in plan.training] == [3] * 11
    assert plan.tokenizer.decode(plan.training[3].token_ids) == "1=0"
    assert plan.training[3].text == "0+0+0+1=0"


def test_a_run_has_its_data_in_order_on_record_and_each_reward_by_name(
    rewarded: Path, laboratory: Laboratory, capsys: pytest.CaptureFixture[str]
) -> None:
    run = rewarded.parent / "run"
    rewarded.write_text(f"{RECIPE}samples = 2\nkeep_best = true\n{SET}{REWARDS}")
    laboratory.trained(run, "trainer.steps=5", recipe=rewarded)  # 10 groups, and an epoch has 3 + 6
    with closing(Ledger(run / "ledger.sqlite", StoreConfig())) as ledger:
        found = ledger.get(DATA, DataRecord)
    assert found == DataRecord.of(planned(rewarded, "trainer.steps=5"))
    assert (check_run(run).kept, check_run(run).notes) == (True, ())
    lines = read_evaluations(run / "metrics.jsonl")["sums"]
    assert all(isinstance(line, SetEvaluationLine) for line in lines)
    assert [(line.step, line.prompts, line.samples) for line in lines] == [(step, 2, 6) for step in (0, 3, 5)]
    print_inspection(run)
    assert f"accuracy of sums  {lines[0].accuracy:.1%} → {lines[-1].accuracy:.1%}" in capsys.readouterr().out
    best = json.loads((run / "best.json").read_text())
    assert sealed(run / "policy" / "best") == sealed(run / "policy" / f"v{best['step']:06d}")
    sources = [row.source for row in read_trajectories(run) if row.group.startswith("0.")]
    assert (sources.count("short"), sources.count("long")) == (6, 12)  # two completions of each prompt

    steps, evaluations = read_metrics(run / "metrics.jsonl")
    assert [line.samples for line in evaluations] == [2, 2]
    assert [set(line.rewards) for line in evaluations] == [{"number", "shortness"}] * 2  # one of `short` is held out
    assert {name for step in steps for name in step.rewards} == {"number", "word", "shortness"}
    for step in steps:
        assert 0 < (step.rewards["shortness"] or 0) <= 1
        assert step.reward <= 1.5
    assert inspect_run(run).rewards == steps[-1].rewards
    trained = [row for row in read_trajectories(run) if row.state == "trained"]
    assert len(trained) == 5 * 2 * 2
    for row in trained:
        own = "number" if row.source == "short" else "word"
        assert set(row.rewards) == {own, "shortness"}
        assert row.reward == pytest.approx(row.rewards[own] + 0.5 * row.rewards["shortness"])
        assert row.verdict == ("right" if row.rewards[own] == 1 else "wrong")
    sample = json.loads((run / "samples.jsonl").read_text().splitlines()[0])
    assert sample["reward"] == pytest.approx(
        0.5 * sample["rewards"]["shortness"] + sample["rewards"].get("number", 0) + sample["rewards"].get("word", 0)
    )
    assert len(sample["rewards"]) == 2


def test_a_resume_with_other_data_or_weights_is_refused(recipe: Path) -> None:
    run = recipe.parent / "run"
    prepare(recipe, [], run, resume=False).folder.release()
    for old, new, expected in [
        ("weight = 2.0", "weight = 3.0", "the sources, their weights or the curriculum are not those of the run"),
        ("prompts = 1\n", f"prompts = 1\nbest_of = 'sum'\n{SET}", "best_of = 'sum' is no set; did you mean 'sums'?"),
        ("prompts = 1\n", f"prompts = 1\n{SET}{SET}", "two sets have one name: sums, sums"),
        (
            "prompts = 1\n",
            f"prompts = 1\n{SET.replace('every', 'evry')}",
            "evaluation.sets.0.evry: unknown key; did you",
        ),
        ('kind = "dataset"', 'kind = "dataset"\ncurriculum = {}', "task.curriculum"),
        ("held_out = 1", "held_out = 2", "the training questions are not those of the run"),
    ]:
        recipe.write_text(RECIPE.replace(old, new))
        with pytest.raises((RunFolderError, RecipeError), match=expected):
            prepare(recipe, [], run, resume=True)
    (run / "questions.jsonl").unlink()  # as if it had been killed before
    (recipe.parent / "short.jsonl").rename(recipe.parent / "moved.jsonl")
    recipe.write_text(RECIPE.replace('data = "short.jsonl"', 'data = "moved.jsonl"\nname = "short"'))
    prepare(recipe, [], run, resume=True).folder.release()
    assert check_run(run).kept


def test_a_resume_is_refused_if_fields_have_changed_that_a_reward_of_ones_own_reads(rewarded: Path) -> None:
    folder, data, module = rewarded.parent, rewarded.parent / "short.jsonl", rewarded.parent / "own_rewards.py"

    def changed(before: str, after: str) -> None:
        data.write_text(data.read_text().replace(before, after))

    def resume() -> None:
        prepare(rewarded, [], folder / "run", resume=True).folder.release()

    changed("}", ', "limit": 3, "image": "<Image at 0x7F1>"}')
    module.write_text(MODULE.replace("answer", "answer, image=None"))
    prepare(rewarded, [], folder / "run", resume=False).folder.release()
    changed("0x7F1", "0x7F2")  # where an object was in memory is no change
    changed("}", ', "level": 1}')
    resume()
    module.write_text(MODULE.replace("answer", "answer, limit=None"))
    resume()
    changed('"limit": 3', '"limit": 4')
    with pytest.raises(RunFolderError, match="the questions' field 'limit', which is read, is not that of the run"):
        resume()
    module.write_text(MODULE.replace("answer", "answer, **fields"))
    changed('"limit": 4', '"limit": 3')
    with pytest.raises(RunFolderError, match="'level'"):
        resume()
    module.write_text(MODULE)
    resume()


def test_a_recipe_of_another_task_has_one_source_without_a_name(recipe: Path) -> None:
    task = '[task]\nkind = "arithmetic"\nprompts = 5\nheld_out = 5\n'
    recipe.write_text(f'[model]\npath = "policy"\n{task}[trainer]\n[sampling]\nmax_tokens = 4\n')
    assert planned(recipe).sources == (PromptSource("", 5, None),)


def test_the_module_is_found_beside_the_recipe_and_questions_know_their_source(rewarded: Path) -> None:
    whole = load_recipe(rewarded)
    assert whole.rewards.path == str(rewarded.parent)
    plan = make_plan(whole)
    assert plan.rows["1+1=", "2"] == Row("", "short")
    assert plan.rows["1=", "+"] == Row("", "long")
    assert len(plan.training) == 3 + 8  # exact_match has no reader, and last_number does not read the words
    assert not plan.notes
    rewarded.write_text(to_toml(whole))
    assert load_recipe(rewarded) == whole


def test_a_gold_answer_is_read_by_the_rewards_of_its_source(rewarded: Path) -> None:
    rewarded.write_text(EVEN + REWARDS.replace('sources = ["short"]', ""))
    plan = make_plan(load_recipe(rewarded))
    assert plan.notes[0] == "8 questions are left out: their gold answers cannot be read"
    assert [prompt.text for prompt in plan.training] == [f"{n}+1=" for n in range(3)]


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ('["long"]', '["longs"]', "rewards.functions.1.sources: no source is called 'longs'; did you mean 'long'?"),
        ('["long"]', '["short"]', ""),
        ("exact_match", "exact", "no built-in reward is called 'exact'; did you mean 'exact_match'?"),
        (":shortness", ":short", "rewards.functions.2.function: 'own_rewards' has no 'short'; did you mean"),
        ("weight = 0.5", "wieght = 0.5", "rewards.functions.2.wieght: unknown key; did you mean 'weight'?"),
        ("weight = 0.5", "weight = nan", "rewards.functions.2.weight"),
        ('name = "word"', 'name = "number"', "two of the functions are called 'number'"),
    ],
)
def test_a_mistake_is_named_with_its_place(rewarded: Path, old: str, new: str, expected: str) -> None:
    rewarded.write_text(EVEN + REWARDS.replace(old, new))
    if not expected:  # the reward for all sources is that of the others
        make_plan(load_recipe(rewarded))
        return
    with pytest.raises(UserError) as caught:
        make_plan(load_recipe(rewarded))
    assert expected in str(caught.value)


@pytest.mark.parametrize("given", [["rewards.function=math"], {"rewards": {"function": "math"}}])
def test_an_override_of_the_one_takes_the_others_away(rewarded: Path, given: Overrides) -> None:
    single = load_recipe(rewarded, given).rewards
    assert ([part.function for part in single.parts], single.functions) == (["math"], ())
    rewarded.write_text(EVEN + '[rewards]\nfunction = "math"\n')
    several = load_recipe(
        rewarded, ["rewards.functions=[{function='exact_match'}, {function='last_number', weight=2}]"]
    )
    assert [(part.title, part.weight) for part in several.rewards.parts] == [("exact_match", 1.0), ("last_number", 2.0)]
    rewarded.write_text(EVEN + REWARDS + '[rewards]\nfunction = "math"\n')
    with pytest.raises(UserError, match=r"give either function \('math'\) or functions"):
        load_recipe(rewarded)


def test_a_source_without_a_reward_is_refused(rewarded: Path) -> None:
    rewarded.write_text(EVEN + REWARDS.partition('[[rewards.functions]]\nname = "word"')[0])
    with pytest.raises(UserError, match=r"rewards\.functions: none judges the completions of source 'long'"):
        make_plan(load_recipe(rewarded))


def test_a_task_without_sources_has_none_to_name(rewarded: Path) -> None:
    task = f'[task]\nkind = "jsonl"\nfile = "{rewarded.parent}/short.jsonl"\nheld_out = 1\n[sampling]'
    before, _, after = EVEN.partition("[task]")
    rewarded.write_text(before + task + after.partition("[sampling]")[2] + REWARDS)
    with pytest.raises(UserError, match="no source is called 'short'; allowed: none: the task has no sources"):
        make_plan(load_recipe(rewarded))


def test_only_the_first_reward_of_a_source_has_to_find_its_gold_answers_right() -> None:
    rows = [
        Question(id=str(n), text=f"{n}=", answer=f"{n}+0={n} #### {n}", place=f"rows.jsonl:{n}") for n in range(1, 4)
    ]
    number, text = RewardPart(function="last_number"), RewardPart(function="final_answer")
    assert try_reward(RewardsConfig(functions=(number, text)), rows) == []
    with pytest.raises(UserError, match="'final_answer' finds 3 of the first 3 gold answers wrong"):
        try_reward(RewardsConfig(functions=(text, number)), rows)


def test_functions_of_python_get_their_names() -> None:
    listed: list[dict[str, Any]] = [{"function": length, "weight": 0.5}, {"function": "math"}, {"function": slow}]
    config = RewardsConfig.model_validate(with_named_reward({"functions": listed}))
    module = "tests.launch.rewards_for_tests"
    assert [part.function for part in config.parts] == [f"{module}:length", "math", f"{module}:slow"]
    assert (config.path, config.title) == (str(Path(__file__).parents[2]), "length + math + slow")
    assert config.parts[0].weight == 0.5


def refusal(task: dict[str, Any], **sections: Any) -> list[str]:
    tree = {"model": {"path": "/a"}, "task": task, "trainer": {}, **sections}
    with pytest.raises(DataError) as refused:
        check_data_files(data_files(validate(tree, "recipe.toml")))
    return str(refused.value).splitlines()


def test_the_files_of_a_task(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.touch()
    assert refusal({"kind": "jsonl", "file": f"{tmp_path}/row.jsonl", "held_out_file": f"{path}x"}) == [
        f"task.file: {tmp_path}/row.jsonl: no such file; did you mean 'rows.jsonl'?",
        f"task.held_out_file: {path}x: no such file; did you mean 'rows.jsonl'?",
    ]


def test_the_files_of_sources_and_of_further_evaluations_but_no_names_of_the_hub(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").touch()
    kept = {"data": f"{tmp_path}/rows.jsonl", "held_out": 1}
    sources = [kept, {"data": f"{tmp_path}/no.csv"}, {"data": "owner/name"}, {"kind": "reasoning_gym", "task": "acre"}]
    gone = tmp_path / "gone"
    sets = [{"name": "far", "source": {"data": f"{gone}/far.csv"}}]
    assert refusal({"kind": "dataset", "sources": sources}, evaluation={"sets": sets}) == [
        f"task.sources.1.data: {tmp_path}/no.csv: no such file; the folder {tmp_path} has rows.jsonl",
        f"evaluation.sets.0.source.data: {gone}/far.csv: no such file; there is no folder {gone}",
    ]
