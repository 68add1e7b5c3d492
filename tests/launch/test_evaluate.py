"""`stretto eval` on datasets: one object with every number, a table, a file of the questions; and what a user gets
wrong is one message before anything starts."""

import json
import shutil
import socket
from pathlib import Path

import pytest

from stretto.core.errors import UserError
from stretto.core.records import Outcome
from stretto.launch.assemble.evaluations import FINAL_ANSWERS
from stretto.launch.recipe.extensions import ClusterConfig
from stretto.loop.records.evaluation import interval, majority, pass_at
from stretto.rollout.tasks import DatasetTask
from stretto_app.extensions.commands.evaluate import Asked, DataChoice, _recipe, evaluate
from tests.launch.running import Laboratory


@pytest.fixture
def model(tmp_path: Path, policy: Path) -> Path:
    shutil.copytree(policy, tmp_path / "policy")
    (tmp_path / "rows.csv").write_text("prompt,answer\n" + "".join(f"{n}+1=,{n + 1}\n" for n in range(5)))
    return tmp_path / "policy"


def test_every_number_of_an_evaluation_follows_from_the_rows_of_its_file(model: Path, laboratory: Laboratory) -> None:
    rows, data = model.parent / "rows.jsonl", model.parent / "rows.csv"
    small = ("sampling.max_tokens=3", "rewards.function=last_number")
    printed = laboratory.run("eval", model, "--data", data, "--n", "4", "--rows", rows, "--json", *small).well()
    found, results = json.loads(printed), [json.loads(line) for line in rows.read_text().splitlines()]
    assert (found["questions"], found["samples"], len(results)) == (5, 20, 5)
    assert [result["id"] for result in results] == [f"rows:{n}" for n in range(1, 6)]
    right = [result["outcomes"].count("right") for result in results]
    assert found["avg"] == found["accuracy"] == sum(right) / 20
    assert found["pass_at"] == {str(k): pytest.approx(sum(pass_at(k, one, 4) for one in right) / 5) for k in (1, 2, 4)}
    assert found["ci95"] == pytest.approx(interval([one / 4 for one in right]))
    assert found["truncated"] == sum(sum(result["truncated"]) for result in results)
    assert found["length_mean"] == sum(sum(result["lengths"]) for result in results) / 20
    final = FINAL_ANSWERS["last_number"]
    for result in results:
        finals = [final(result["prompt"], text) for text in result["completions"]]
        assert result["majority"] == majority([Outcome(one) for one in result["outcomes"]], finals)
    assert found["maj"] == pytest.approx(sum(result["majority"] for result in results) / 5)
    table = laboratory.run("eval", model, "--data", data, "--n", "4", *small).out
    assert f"accuracy {found['avg']:.4f}: {sum(right)} of 20 right" in table  # the same again
    assert "maj@4" in table


def test_the_same_ids_have_the_same_completions_and_the_help_says_where_ids_differ(
    model: Path, laboratory: Laboratory
) -> None:
    folder = model.parent
    (rows := folder / "rows.jsonl").write_text("".join(f'{{"prompt": "{n}+1=", "answer": 7}}\n' for n in range(5)))
    kinds = {
        "dataset": f'sources = [{{ data = "{rows}", held_out = 0 }}]\nheld_out_sources = [{{ data = "{rows}" }}]',
        "jsonl": f'file = "{rows}"\nheld_out_file = "{rows}"',
    }
    for kind, text in kinds.items():
        (folder / f"{kind}.toml").write_text(f'trainer = {{}}\n[task]\nkind = "{kind}"\n{text}\n')

    def completions(*asked: str | Path) -> list[list[str]]:
        small = ("sampling.max_tokens=3", "rewards.function=last_number")
        laboratory.run("eval", model, *asked, "--n", "4", "--rows", folder / "out", *small).well()
        return [json.loads(line)["completions"] for line in (folder / "out").read_text().splitlines()]

    sources, numbered = completions("--data", rows), completions("--task", rows)
    assert completions("--task", folder / "dataset.toml") == sources != numbered
    assert completions("--task", folder / "jsonl.toml") == numbered
    told = " ".join(laboratory.run("eval", "--help").out.split())
    assert "NAME:ROW as in a recipe's sources, ROW with --task FILE.jsonl" in told


RECIPE = """
task = {{ kind = "arithmetic", operands_max = 3, held_out = 8, prompts = 64, demonstrations = 0 }}
sampling = {{ max_tokens = 3 }}
evaluation = {{ prompts = 8 }}
trainer = {{ ranks = 3, remote_ranks = 1 }}
cluster = {{ placer = "given", listen = "127.0.0.1:{port}", trusted_network = true }}
"""


def test_a_recipe_whose_engines_run_elsewhere_is_evaluated_here_while_its_run_has_the_port(
    model: Path, laboratory: Laboratory
) -> None:
    recipe = model.parent / "recipe.toml"
    with socket.socket() as gate:
        gate.bind(("127.0.0.1", 0))
        gate.listen()
        recipe.write_text(RECIPE.format(port=gate.getsockname()[1]))
        assert json.loads(laboratory.run("eval", model, "--task", recipe, "--json").well())["questions"] == 8
    assert _recipe(model, recipe, (), None).cluster == ClusterConfig(trusted_network=True)  # of servers elsewhere


@pytest.mark.parametrize(
    ("choice", "rows", "expected"),
    [
        (DataChoice(("rows.csv",), mapping="gsm"), None, "--mapping: 'gsm'; did you mean 'gsm8k'?"),
        (DataChoice(("rows.csv",), mapping="gsm8k"), None, "rows.csv:2: no field 'question'"),
        (DataChoice(("none.csv",)), None, "--data: none.csv: no such file; did you mean 'rows.csv'?"),
        (DataChoice(("reasoning-gym:chain_summ",)), None, "there is no such task; did you mean 'chain_sum'?"),
        (
            DataChoice(("rows.csv",)),
            Path("nowhere/rows.jsonl"),
            "--rows: nowhere/rows.jsonl: its folder does not exist",
        ),
        (DataChoice(("rows.csv",)), Path(), "--rows: .: is a folder"),
        (DataChoice(("rows.jsonl",)), None, "--data: task.sources.0.prompt_feld: unknown key; did you mean"),
        (DataChoice(("rows.csv", "rows.csv")), None, "two sources are called 'rows'"),
    ],
)
def test_a_mistake_is_one_message(
    model: Path, monkeypatch: pytest.MonkeyPatch, choice: DataChoice, rows: Path | None, expected: str
) -> None:
    monkeypatch.chdir(model.parent)
    overrides = ["sampling.max_tokens=3", *(["source.prompt_feld=q"] if "prompt_feld" in expected else [])]
    with pytest.raises(UserError) as caught:
        evaluate(model, choice, overrides, asked=Asked(rows=rows))
    assert expected in str(caught.value)


def test_a_mapping_brings_its_reward_and_a_task_of_reasoning_gym_its_own() -> None:
    assert DataChoice(("owner/name",), mapping="humaneval").tree()["rewards"] == {"function": "code"}
    assert DataChoice(("reasoning-gym:chain_sum",)).tree()["rewards"] == {"function": "reasoning_gym"}
    assert DataChoice(("owner/name",)).tree()["rewards"] == {}
    gym = DataChoice(("reasoning-gym:chain_sum",)).tree(["source.level=0", "source.size=9"])
    found = DatasetTask.model_validate(gym["task"]).questions(gym["seed"])
    assert found.training == found.held_out  # a task with few questions is asked as well
    assert len(found.held_out) == 9
    assert gym["seed"] != 1  # which is that of most runs
    asked = DataChoice(("owner/name",), mapping="gsm8k").tree(["source.subset=main", "rewards.function=last_number"])
    assert asked["rewards"] == {"function": "last_number"}
    several = DataChoice(("owner/name",), mapping="gsm8k").tree(["rewards.functions=[{function='math'}]"])
    assert several["rewards"] == {"functions": [{"function": "math"}]}
    (source,) = asked["task"]["sources"]
    assert (source["data"], source["subset"], source["split"]) == ("owner/name", "main", "test")


@pytest.mark.parametrize(
    ("reward", "completion", "final"),
    [
        ("math", r"So \boxed{\frac12}", r"\frac12"),
        ("math", "the answer is  7.", "7"),
        ("last_number", "1 and then 1,250", "1250"),
        ("last_number", "none", None),
        ("final_answer", "3+4=7", "7"),
        ("exact_match", "  a  b ", "a b"),
        ("reasoning_gym", "<answer> x </answer>", "x"),
        *[("last_number", "<think>5</think>", None), ("last_number", "<think>5", None)],
        *[("last_number", "(3,4)", "4"), ("last_number", "072.50", "72.5")],
        *[("final_answer", "<think>x=5", None), ("final_answer", "<think>x=5</think>x=07", "7")],
        *[("reasoning_gym", "<think><answer>5</answer></think>7", "7"), ("reasoning_gym", "<think>7", None)],
        ("math", "<think>" + "well " * 5000 + "so it is 42", None),  # the mark is far before the end
    ],
)
def test_final_answers_are_read_as_the_reward_reads_them(reward: str, completion: str, final: str | None) -> None:
    assert FINAL_ANSWERS[reward]("", completion) == final
