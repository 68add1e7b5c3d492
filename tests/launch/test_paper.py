"""Recipes for other machines, and `--dry-run` where a model folder has its config.json alone.

- A recipe is checked against the shape of the model; what cannot be checked without weights is told.
- A mistake is refused as it is with the weights; a run is not started without them.
- Recipes that people take along are valid, and the commands in them are commands of stretto; so are the keys of
  `[cluster]` and `[weights]` for many machines, and the commands that join.
"""

import json
import re
import shlex
import shutil
import string
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml  # type: ignore[import-untyped]

from benchmarks.lengths import batch
from stretto.core.errors import RecipeError, UserError
from stretto.core.frames import LARGEST_BATCH, frame
from stretto.launch.recipe.recipe import load_recipe
from stretto.launch.train import prepare
from stretto.model.hf.build import build_policy
from stretto_app.cli.main import app
from stretto_app.extensions.preflight.dry_run import check
from stretto_app.extensions.preflight.paper import is_on_paper, outline
from tests.launch.running import TINY as RUN
from tests.tiny_policy import TINY

ROOT = Path(__file__).parents[2]
RECIPES = ROOT / "recipes"
MODELS = ROOT / "tests" / "data" / "models"
SMALL, LARGE = MODELS / "qwen3_0.6b", MODELS / "qwen2.5_7b"
TAKEN_ALONG = {"vllm_1gpu": SMALL, "sglang_8gpu": LARGE, "ray_2x8": LARGE}


@pytest.mark.parametrize(("name", "model"), TAKEN_ALONG.items(), ids=TAKEN_ALONG)
def test_a_recipe_for_gpus_is_checked_by_its_config(name: str, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    check(RECIPES / f"{name}.toml", [f"model.path={model}"])
    told = capsys.readouterr().out
    assert "nothing was started" in told
    assert "not checked: the weights" in told
    assert "not checked: the tokens of prompts" in told
    assert "not checked: devices, ports and memory" in told


def test_the_parameters_are_those_of_the_model(tmp_path: Path) -> None:
    """Worked by hand from the shapes: embedding 151,936 × 1,024, 28 layers of 15,730,944, a norm of 1,024; and twice
    152,064 × 3,584, 28 layers of 233,057,792, a norm of 3,584."""
    counts = {}
    for model in (SMALL, LARGE):
        recipe = load_recipe(RECIPES / "from_hf.toml", [f"model.path={model}"])
        assert is_on_paper(recipe)
        counts[model] = outline(recipe).base.parameters
    assert counts == {SMALL: 596_049_920, LARGE: 7_615_616_512}


def test_a_mistake_is_refused_without_the_weights_as_with_them(tmp_path: Path) -> None:
    def refused(*overrides: str) -> str:
        with pytest.raises(UserError) as caught:
            check(RECIPES / "vllm_1gpu.toml", [f"model.path={SMALL}", *overrides])
        return str(caught.value)

    assert "the model's context has 40960 tokens" in refused("sampling.max_tokens=50000")
    assert "engine.batching" in refused('engine.batching="rounds"')
    assert "top_k = 200000" in refused("sampling.top_k=200000")
    assert "no_such_reward" in refused("rewards.function=no_such_reward")
    broken = tmp_path / "model"
    broken.mkdir()
    config = json.loads((SMALL / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 0}))
    assert "num_hidden_layers: 0; a positive whole number is needed" in refused(f"model.path={broken}")


def test_with_a_tokenizer_prompts_are_read_and_only_the_weights_are_missing(tmp_path: Path) -> None:
    whole, bare = tmp_path / "whole", tmp_path / "bare"
    build_policy(TINY, whole, seed=1)
    shutil.copytree(whole, bare, ignore=shutil.ignore_patterns("*.safetensors"))
    (tmp_path / "rows.jsonl").write_text('{"prompt": "3+8=", "answer": "11"}\n' * 3)
    (tmp_path / "recipe.toml").write_text(
        '[model]\npath = "bare"\n[task]\nkind = "jsonl"\nfile = "rows.jsonl"\nheld_out = 1\n'
        "[sampling]\nmax_tokens = 4\n[trainer]\n"
    )
    outlined = outline(load_recipe(tmp_path / "recipe.toml"))
    assert outlined.longest_prompt == 4
    assert [note for note in outlined.notes if "tokens" in note] == []
    assert not is_on_paper(load_recipe(tmp_path / "recipe.toml", [f"model.path={whole}"]))


@pytest.mark.parametrize("recipe", sorted(RECIPES.glob("paper/*.toml")), ids=lambda path: path.stem)
def test_a_batch_of_the_papers_longest_completions_fits_into_an_order(recipe: Path) -> None:
    """By the bytes that each token of a framed batch takes, its text of four characters a token included."""
    found = load_recipe(recipe)
    sequences = found.rollout.batch_size * found.rollout.group_size
    length = 1000
    some = batch([(1, (length, length))], vocabulary=150_000, version=1)
    each = (len(frame(some)) - len(frame(batch([(1, (1, 1))], vocabulary=150_000, version=1)))) / (2 * (length - 1))
    assert 12 <= each <= 14, "ids, log-probabilities and versions are sealed columns"
    assert sequences * found.sampling.max_tokens * (each + 4) < LARGEST_BATCH


def test_a_run_does_not_start_without_weights(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="it holds no weights"):
        prepare(RECIPES / "from_hf.toml", [f"model.path={SMALL}"], tmp_path / "run", resume=False)
    assert not (tmp_path / "run").exists()


def commands_in(text: str) -> Iterator[list[str]]:
    """The commands of stretto in a script or a comment, their variables filled in."""
    filled = string.Template(text.replace("\\\n", " ")).safe_substitute(VALUES)
    for found in re.findall(r"\bstretto ((?:train|engine|scale) [^\n;|&`]*)", filled):
        words = shlex.split(found.split("  #")[0].removesuffix(")"))
        yield words


#: What stands for the variables of a script.
VALUES = {"RECIPE": "recipe.toml", "RUN_DIR": "run", "PORT": "7420", "ENGINES": "8", "RANKS": "8", "JOIN": "node:7420"}


def assert_is_a_command(words: list[str]) -> None:
    """Its options are parsed as the command line parses them; nothing runs."""
    command = typer.main.get_command(app).commands[words[0]]  # type: ignore[attr-defined]
    command.make_context(words[0], words[1:])


@pytest.mark.parametrize(
    ("file", "count"), [("vllm_1gpu.toml", 2), ("sglang_8gpu.toml", 1), ("ray_2x8.toml", 2), ("slurm.sbatch", 4)]
)
def test_the_commands_in_a_recipe_are_commands_of_stretto(file: str, count: int) -> None:
    found = list(commands_in((RECIPES / file).read_text()))
    assert len(found) == count
    for words in found:
        assert_is_a_command(words)
        if file in ("vllm_1gpu.toml", "sglang_8gpu.toml"):
            assert (ROOT / words[1]).is_file()


def test_the_recipe_for_two_machines_uses_all_of_their_gpus() -> None:
    recipe = load_recipe(RECIPES / "ray_2x8.toml")
    assert recipe.trainer.ranks + recipe.engine.count == 2 * 8
    assert (recipe.cluster.placer, recipe.weights.medium) == ("ray", "http")
    with pytest.raises(RecipeError, match='"broadcast", and machines may join'):
        check(RECIPES / "ray_2x8.toml", [f"model.path={LARGE}", "weights.medium=broadcast"])


def test_engines_that_are_given_need_an_address_where_they_join() -> None:
    with pytest.raises(RecipeError, match='placer = "given" needs listen = "HOST:PORT"'):
        load_recipe(RUN, ["cluster.placer=given"])
    assert load_recipe(RUN, ["cluster.placer=given", "cluster.listen=0.0.0.0:0"]).cluster.placer == "given"


def script() -> str:
    return (RECIPES / "slurm.sbatch").read_text()


def test_the_script_for_slurm_is_a_script() -> None:
    done = subprocess.run(["bash", "-n", RECIPES / "slurm.sbatch"], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    orders = dict(re.findall(r"^#SBATCH --([a-z-]+)=(\S+)$", script(), flags=re.MULTILINE))
    assert int(orders["nodes"]) > 1
    assert orders["ntasks-per-node"] == "1"  # one agent on each node, which deals the GPUs to its engines
    assert orders["signal"].startswith("B:TERM@")
    (start,) = [words for words in commands_in(script()) if words[0] == "train" and "--resume" not in words]
    recipe = load_recipe(RECIPES / "ray_2x8.toml", [word for word in start[1:] if "=" in word])
    assert (recipe.trainer.ranks, recipe.cluster.placer, recipe.cluster.listen) == (8, "given", "0.0.0.0:7420")
    assert recipe.deadlines.stop < 300  # seconds from Slurm's signal to the end


def objects() -> dict[str, Any]:
    return {one["kind"]: one for one in yaml.safe_load_all((RECIPES / "kubernetes.yaml").read_text())}


def containers() -> dict[str, dict[str, Any]]:
    found = {kind: objects()[kind]["spec"]["template"]["spec"] for kind in ("Job", "Deployment")}
    return {kind: pod["containers"][0] | {"pod": pod} for kind, pod in found.items()}


def test_the_objects_for_kubernetes_fit_together() -> None:
    service, job, engines = (objects()[kind] for kind in ("Service", "Job", "Deployment"))
    assert service["spec"]["selector"] == job["spec"]["template"]["metadata"]["labels"]
    assert service["spec"]["clusterIP"] == "None"  # the weights have a port of their own
    assert engines["spec"]["selector"]["matchLabels"] == engines["spec"]["template"]["metadata"]["labels"]
    (port,) = service["spec"]["ports"]
    train, engine = containers()["Job"], containers()["Deployment"]
    assert engine["command"] == ["stretto"]
    assert_is_a_command(engine["args"])
    assert train["ports"] == [{"containerPort": port["port"]}]
    joined = engine["args"][engine["args"].index("--join") + 1]
    assert joined == f"{service['metadata']['name']}:{port['port']}"
    for container in (train, engine):
        assert {mount["name"] for mount in container["volumeMounts"]} == {
            v["name"] for v in container["pod"]["volumes"]
        }
        (memory,) = (volume for volume in container["pod"]["volumes"] if volume["name"] == "memory")
        assert memory["emptyDir"]["medium"] == "Memory"
        assert gibibytes(memory["emptyDir"]["sizeLimit"]) < gibibytes(container["resources"]["limits"]["memory"])
        (token,) = container["env"]
        assert token["name"] == "STRETTO_TOKEN"
        assert token["valueFrom"]["secretKeyRef"] == {"name": "stretto", "key": "token"}


def gibibytes(size: str) -> int:
    return int(size.removesuffix("Gi"))


def test_the_run_on_kubernetes_is_a_script_of_commands() -> None:
    train = containers()["Job"]
    assert train["command"] == ["/bin/sh", "-c"]
    (text,) = train["args"]
    assert subprocess.run(["sh", "-n", "-c", text], check=False).returncode == 0
    found = list(commands_in(text))
    assert len(found) == 2  # to start, and to go on
    for words in found:
        assert_is_a_command(words)
