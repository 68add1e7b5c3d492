"""Promises about parts of the user's own, before a run and in one.

- A part that raises, returns something of another shape or type, is no number, or does not return, is refused by the
  trial with its place and its line; so is a name that leads nowhere; all of one recipe at once, with exit code 2.
- What a part raises or wrongly returns in a run ends it with the same sentence.
- An admission policy that breaks equation 3 is told of by the trial, and `stretto check` says so, by its law.
"""

import sys
from pathlib import Path
from types import ModuleType

import pytest

from stretto.core.errors import RecipeError, UserError
from stretto.doors.loading import look_in
from stretto.launch.preflight.paths import check_functions
from stretto.launch.recipe.recipe import load_recipe
from stretto.launch.recorded import digests_of
from stretto.rewards.config import RewardsConfig
from stretto.rollout.workflow import WorkflowConfig
from stretto_app.extensions.preflight import trial
from stretto_app.extensions.preflight.trial import try_parts
from stretto_report.audit.check import check_run
from stretto_workflows.built_in.environment import EnvironmentPlay
from tests.launch.running import TINY, Laboratory

BROKEN = """
import sys, time
import torch
from stretto.doors.door import declare
from stretto.trainer.objective.corrections import Weights
from stretto.trainer.objective.decoupled_ppo import Terms

NUMBER = 3

def terms(policy, tokens, objective=None, ratio=None, bounded=None):
    plain = torch.ones_like(tokens.advantages)
    return Terms(policy * tokens.advantages if objective is None else objective,
                 plain if ratio is None else ratio, plain > 2 if bounded is None else bounded)

def raising(policy, tokens):
    return terms(policy, tokens.advantage)

def leaving(policy, tokens):
    sys.exit("no")

def interrupting(policy, tokens):
    raise KeyboardInterrupt

def hanging(policy, tokens):
    time.sleep(60)

def mean(policy, tokens):
    return terms(policy, tokens, objective=(policy * tokens.advantages).mean())

def number(policy, tokens):
    return policy.sum()

def infinite(policy, tokens):
    return terms(policy, tokens, objective=policy / 0)

def steep(policy, tokens):
    return terms(policy, tokens, objective=(policy - policy.detach()).abs().sqrt())

def flat(policy, tokens):
    return terms(policy, tokens, objective=tokens.advantages)

def counted(policy, tokens):
    return terms(policy, tokens, bounded=tokens.advantages)

@declare(anchors=("before",))
def anchored(policy, tokens):
    return terms(policy, tokens)

@declare(anchors=("behavior",), selection=lambda log_ratio, advantages: [True])
def selecting(policy, tokens):
    return terms(policy, tokens)

def third(policy, tokens, clip):
    return terms(policy, tokens)

def untyped(policy, tokens, *, clip=None):
    return terms(policy, tokens)

def unreadable(policy, tokens, *, clip: "Clip" = 3):
    return terms(policy, tokens)

def tensor(policy, tokens, *, clip: torch.Tensor = None):
    return terms(policy, tokens)

def kind(policy, tokens, *, kind: str = "mine"):
    return terms(policy, tokens)

def anchor(policy, tokens, *, anchor: str = "mine"):
    return terms(policy, tokens)

def negative(tokens):
    return Weights(torch.log(-torch.ones_like(tokens.advantages)), tokens.advantages > 9)

def bare(tokens):
    return torch.ones_like(tokens.advantages)

def short(groups):
    return [[0.0] for group in groups]

def undefined(groups):
    return [[completion.total / 0 if completion.total else 0.0 for completion in group] for group in groups]

def nan(groups):
    return [[float("nan")] * len(group) for group in groups]

def huge(groups):
    return [[10**400] * len(group) for group in groups]

def pairs(groups):
    return [[torch.ones(2)] * len(group) for group in groups]

@declare(along=True)
def per_completion(groups):
    return [[completion.total for completion in group] for group in groups]

def keeps(group):
    return [trajectory.id for trajectory in group.trajectories]

def strangers(group):
    return {"0.1.2/3": "is none of ours"}

def everything(group):
    return {trajectory.id: "no" for trajectory in group.trajectories}

SEEN = set()

def again(group):
    new = {trajectory.id for trajectory in group.trajectories} - SEEN
    SEEN.update(new)
    return {trajectory.id: "seen" for trajectory in group.trajectories if trajectory.id not in new}

def silent(group):
    return {trajectory.id: None for trajectory in group.trajectories}

class Still:
    def open(self, may_start, in_flight):
        return may_start

class Maybe:
    def opens(self, may_start, in_flight):
        return in_flight

class Narrow:
    def opens(self, may_start):
        return may_start

class Crowded:
    def opens(self, may_start, in_flight):
        if in_flight == 2:
            time.sleep(5)
        return may_start

class Needy:
    def __init__(self, first):
        self.first = first

class Eager:
    def opens(self, may_start, in_flight):
        return True

class Make:
    def __init__(self, http, load_seconds):
        self.http = http

    def ready(self):
        return True

    async def pause(self):
        pass

class Tool:
    def __init__(self, about, cursor):
        self.run = about.name

    def send(self, points, first):
        raise ConnectionError("no answer")

    def table(self, step, rows, points): ...
    def alarm(self, alarm): ...
    def close(self): ...

class Late(Tool):
    async def send(self, points, first): ...

class Mute:
    def __init__(self, about, cursor):
        self.run = about.name
"""


OTHERS = """
[algorithm]
loss = "broken:mean"
advantages = "broken:nan"
[logging]
to = "broken:Tool"
"""


@pytest.fixture
def broken(tmp_path: Path) -> Path:
    (tmp_path / "broken.py").write_text(BROKEN)
    (tmp_path / "raising.py").write_text("import json\n\njson.loads('{')\n")
    (tmp_path / "odd.py").write_text("def __getattr__(name):\n    raise ValueError(name)\n")
    (tmp_path / "lacking.py").write_text("import nosuchpackage\n")
    return tmp_path


RAISES = BROKEN.splitlines().index("    return terms(policy, tokens.advantage)") + 1

TRIED = [
    ("algorithm.loss", "raising", ["raised AttributeError", f"broken.py:{RAISES}"]),
    ("algorithm.loss", "leaving", ["raised SystemExit: no", "broken.py:"]),
    ("algorithm.loss", "interrupting", ["raised KeyboardInterrupt", "broken.py:"]),
    ("algorithm.loss", "hanging", ["has not returned after 0.5 s"]),
    ("algorithm.loss", "mean", ["objective has the shape [] for 6 tokens, and not [6]"]),
    ("algorithm.loss", "number", ["returned Tensor, and not Terms(objective, ratio, bounded)"]),
    ("algorithm.loss", "infinite", ["objective has -inf in it"]),
    ("algorithm.loss", "steep", ["the gradient of its objective has nan in it"]),
    ("algorithm.loss", "flat", ["does not depend on policy_logprobs"]),
    ("algorithm.loss", "counted", ["bounded is of torch.float32, and not of torch.bool"]),
    ("algorithm.loss", "selecting", ["its selection is list, and not a tensor"]),
    ("algorithm.correction", "negative", ["weight has nan in it"]),
    ("algorithm.correction", "bare", ["returned Tensor, and not Weights(weight, corrected)"]),
    ("algorithm.advantages", "short", ["returned [[0.0], [0.0]], and not a number for each completion of each group"]),
    ("algorithm.advantages", "undefined", ["raised ZeroDivisionError", "broken.py:"]),
    ("algorithm.advantages", "nan", ["returned nan, which is not a finite number"]),
    ("algorithm.advantages", "huge", ["returned a whole number that is too large for a float"]),
    ("algorithm.advantages", "pairs", ["returned [[tensor([1., 1.])", "a number for each completion of each group"]),
    ("algorithm.advantages", "per_completion", ["a number for each loss token", "declared to go along them"]),
    ("rollout.filter", "keeps", ["returned list, and not a reason for each trajectory"]),
    ("rollout.filter", "strangers", ["refuses '0.1.2/3', which is no trajectory of the group"]),
    ("rollout.filter", "silent", ["gives None as a reason"]),
    ("rollout.pacing", "Still", ["has no method opens(may_start, in_flight)"]),
    ("rollout.pacing", "Maybe", ["returned 0 for opens(True, 0), and not whether a group starts"]),
    ("rollout.pacing", "Narrow", ["takes 2 positional arguments but 3 were given; in ", "broken.py"]),
    ("rollout.pacing", "Crowded", ["has not returned after 0.5 s"]),
    (
        "engine.kind",
        "Make",
        ["has no method stream, describe", "'ready' that is not asynchronous", "'pause' that is called"],
    ),
    ("logging.to", "Tool", ["raised ConnectionError: no answer", "broken.py:"]),
    ("logging.to", "Late", ["has an asynchronous method send, which is called and not awaited"]),
    ("logging.to", "Mute", ["has no method send, table, alarm, close"]),
]


@pytest.mark.parametrize(("key", "name", "words"), TRIED, ids=[name for _, name, _ in TRIED])
def test_a_broken_part_is_refused_by_its_trial(
    broken: Path, key: str, name: str, words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trial, "_PATIENCE", 0.5 if name in ("hanging", "Crowded") else 30.0)
    recipe = load_recipe(TINY, [f"path={broken}", f"{key}=broken:{name}"])
    with pytest.raises(RecipeError) as refused:
        try_parts(recipe, outlets=True)
    assert all(problem.place == key for problem in refused.value.problems)
    assert [word for word in words if word not in str(refused.value)] == []
    assert f"'broken:{name}'" in str(refused.value)
    assert "for 1 token" not in str(refused.value), "what is wrong of six tokens is not said of one again"


def test_a_filter_that_refuses_all_that_it_is_tried_on_is_told(broken: Path) -> None:
    recipe = load_recipe(TINY, [f"path={broken}", "rollout.filter=broken:everything"])
    (told,) = try_parts(recipe, outlets=False)
    assert told.startswith("rollout.filter: 'broken:everything' refuses all trajectories that it was tried on; ")


def test_a_filter_that_remembers_is_tried_once(broken: Path) -> None:
    recipe = load_recipe(TINY, [f"path={broken}", "rollout.filter=broken:again"])
    assert try_parts(recipe, outlets=False) == []


@pytest.mark.parametrize("depth", [0, 1, 2], ids=["folders", "a folder in a package", "packages"])
def test_the_source_of_a_part_is_found_in_packages_without_running_it(tmp_path: Path, depth: int) -> None:
    package = tmp_path / "my_parts" / "inner"
    package.mkdir(parents=True)
    for folder in (package.parent, package)[:depth]:
        (folder / "__init__.py").write_text("raise SystemExit('imported')\n")
    (package / "judging.py").write_text("raise SystemExit('imported')\n")
    rewards = RewardsConfig(function="my_parts.inner.judging:judge", path=str(tmp_path))
    wanted = load_recipe(TINY).model_copy(update={"rewards": rewards})
    first = digests_of(wanted)
    assert list(first) == ["my_parts.inner.judging:judge"]
    (package / "judging.py").write_text("judge = max\n")
    assert digests_of(wanted).keys() == first.keys()
    assert digests_of(wanted) != first
    (package / "judging.py").unlink()
    assert digests_of(wanted) == {}


def test_the_source_of_an_environment_is_one_of_the_parts(tmp_path: Path) -> None:
    (tmp_path / "my_rooms.py").write_text("class Room: ...\n")
    workflow = WorkflowConfig(function="environment", path=str(tmp_path), settings={"make": "my_rooms:Room"})
    assert "my_rooms:Room" in digests_of(load_recipe(TINY).model_copy(update={"workflow": workflow}))


WRITTEN = "one of your own is written 'package.module:name'"
NAMED = [
    ("algorithm.loss", "poo", f"did you mean 'ppo'?; {WRITTEN}"),
    ("algorithm.advantages", "gae_of_mine", WRITTEN),
    ("rollout.filter", "zero_varianc", f"did you mean 'zero_variance'?; {WRITTEN}"),
    ("rollout.pacing", "slow", WRITTEN),
    ("logging.to", "wandbb", f"did you mean 'wandb'?; {WRITTEN}"),
    ("algorithm.loss", "nowhere:loss", "cannot import 'nowhere': ModuleNotFoundError"),
    ("algorithm.loss", "raising:loss", "cannot import 'raising': JSONDecodeError"),
    ("algorithm.loss", "lacking:loss", "imports 'nosuchpackage', which is not in the environment of stretto"),
    ("algorithm.loss", "odd:loss", "'odd' gives no 'loss': ValueError: loss; raised in "),
    ("algorithm.loss", "broken.mean", "one of your own is written 'broken:mean'"),
    ("algorithm.loss", "broken:", "'broken:' names no loss; it is written 'package.module:name'"),
    ("algorithm.loss", "broken:NUMBER", "is int, which cannot be called; it is called with (policy_logprobs, tokens)"),
    ("algorithm.loss", "broken:third", "has another signature: missing a required argument: 'clip'"),
    ("algorithm.loss", "broken:untyped", "the parameter 'clip' has no type"),
    ("algorithm.loss", "broken:unreadable", "the type of 'clip' cannot be read: name 'Clip' is not defined"),
    ("algorithm.loss", "broken:tensor", "a parameter by name is a number, a text"),
    ("algorithm.loss", "broken:kind", "'kind' has a name that a section uses itself"),
    ("algorithm.loss", "broken:anchor", "'anchor' has a name that a section uses itself"),
    ("algorithm.loss", "broken:anchored", "a tuple of some of recomputed, interpolated, behavior is needed"),
    ("algorithm.loss", "broken:declared", "has no 'declared'; allowed: "),
    ("algorithm.correction", "broken:bear", "'broken' has no 'bear'; did you mean 'bare'?"),
    ("algorithm.advantages", "broken.short", "one of your own is written 'broken:short'"),
    ("rollout.filter", "broken.keeps", "one of your own is written 'broken:keeps'"),
    ("rollout.pacing", "broken:Needy", "has another signature: missing a required argument: 'first'"),
    ("engine.kind", "broken.Make", "one of your own is written 'broken:Make'"),
    ("engine.kind", "broken:NUMBER", "is int, which cannot be called; it is called with (http, load_seconds)"),
    ("logging.to", "broken.Tool", "one of your own is written 'broken:Tool'"),
    ("logging.to", "broken:Tol", "'broken' has no 'Tol'; did you mean 'Tool'?"),
]


@pytest.mark.parametrize(("key", "name", "words"), NAMED, ids=[f"{key}={name}" for key, name, _ in NAMED])
def test_a_name_that_leads_nowhere_is_refused_with_the_recipe(broken: Path, key: str, name: str, words: str) -> None:
    with pytest.raises(RecipeError) as refused:
        load_recipe(TINY, [f"path={broken}", f"{key}={name}"])
    (problem,) = refused.value.problems
    assert problem.place.startswith(f"override {key}")
    assert words in str(problem)


DOORS = ["algorithm.loss", "algorithm.advantages", "algorithm.correction", "rollout.filter", "rollout.pacing"]
DOORS += ["engine.kind", "logging.to", "rewards.function", "workflow.function"]


def check_named(recipe: Path, key: str, name: str) -> None:
    if key in DOORS:
        check_functions(load_recipe(recipe, [f"{key}={name}"]))
    else:
        look_in(str(recipe.parent))
        EnvironmentPlay(name)


@pytest.mark.parametrize("key", [*DOORS, "workflow.settings.make"])
def test_every_door_names_the_nearest_module_and_the_nearest_name_in_it(broken: Path, key: str) -> None:
    (broken / "pack").mkdir()
    (broken / "pack" / "inner.py").touch()
    (broken / "beside.py").write_text("class Tool: ...")
    (broken / "recipe.toml").write_text(TINY.read_text())
    for name, near in (
        ("besde:Tool", "did you mean 'beside'?"),
        ("pak.inner:Tool", "did you mean 'pack'?"),
        ("beside:Tol", "did you mean 'Tool'?"),
        ("pack/inner.py:Tool", "it is written 'pack.inner:Tool'"),
    ):
        with pytest.raises(UserError) as refused:
            check_named(broken / "recipe.toml", key, name)
        assert str(refused.value).endswith(f"; {near}")


def test_a_module_without_a_file_is_looked_into_as_any_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """As `__main__` of a script or of the command."""
    monkeypatch.setitem(sys.modules, "bare", ModuleType("bare"))
    with pytest.raises(RecipeError, match=r"algorithm\.loss: 'bare' has no 'loss'"):
        load_recipe(TINY, ["algorithm.loss=bare:loss"])


def test_a_module_name_that_is_too_long_for_a_file_is_refused_with_the_recipe() -> None:
    with pytest.raises(RecipeError, match=r"algorithm\.loss: cannot import 'aaa"):
        load_recipe(TINY, [f"algorithm.loss={'a' * 300}:loss"])


def test_the_dry_run_names_all_of_them_at_once(laboratory: Laboratory, broken: Path) -> None:
    recipe = broken / "recipe.toml"
    text = TINY.read_text().replace("max_staleness = 1\n", "max_staleness = 1\nfilter = 'broken:keeps'\n")
    recipe.write_text(text + OTHERS)
    ended = laboratory.run("train", "--dry-run", recipe)
    ended.refused("algorithm.loss: 'broken:mean'", "algorithm.advantages: 'broken:nan'")
    ended.refused("rollout.filter: 'broken:keeps'", "logging.to: 'broken:Tool' raised ConnectionError")
    wrong = ("algorithm.loss=nowhere:f", "rollout.pacing=broken.Still", "trainer.step=3")
    ended = laboratory.run("train", "--dry-run", recipe, *wrong)
    ended.refused("algorithm.loss: cannot import 'nowhere'", "rollout.pacing: 'broken.Still'")
    ended.refused("trainer.step: unknown key")


LATER = """
from stretto.trainer.objective.decoupled_ppo import ppo

def loss(policy_logprobs, tokens):
    if len(policy_logprobs) > 6:
        raise KeyError("no such token")
    return ppo(policy_logprobs, tokens)

def sums(policy_logprobs, tokens):
    terms = ppo(policy_logprobs, tokens)
    return terms if len(policy_logprobs) <= 6 else terms.objective.sum()

def hard(group):
    return {} if len(group.trajectories) < 4 or group.prompt.id == "17" else 1 / 0
"""


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("algorithm.loss=later:loss", "'later:loss' raised KeyError: 'no such token'; in {}/later.py:6"),
        ("rollout.filter=later:hard", "'later:hard' raised ZeroDivisionError: division by zero; in {}/later.py:14"),
        (
            "algorithm.loss=later:sums",
            "'later:sums' returned Tensor, and not Terms(objective, ratio, bounded): tens",
        ),
    ],
)
def test_what_a_part_raises_in_a_run_ends_it_with_its_place(
    laboratory: Laboratory, tmp_path: Path, override: str, words: str
) -> None:
    (tmp_path / "later.py").write_text(LATER)
    with laboratory.train(tmp_path / "run", override, f"path={tmp_path}") as command:
        command.end().refused(words.format(tmp_path))


def test_admission_that_breaks_equation_3_is_told_and_found_by_the_law(laboratory: Laboratory, broken: Path) -> None:
    eager = (f"path={broken}", "rollout.pacing=broken:Eager", "trainer.steps=4")
    ended = laboratory.trained(broken / "run", *eager)
    assert "'broken:Eager' starts groups where equation 3 does not allow it" in ended.out.replace("\n", " ")
    breaches = check_run(broken / "run").breaches
    assert {law for law, found in breaches.items() if found} == {"no group starts before its turn"}
    checked = laboratory.run("check", broken / "run")
    assert checked.code == 1
    assert "BROKEN  no group starts before its turn" in checked.out
