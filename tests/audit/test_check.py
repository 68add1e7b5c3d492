"""The checker: a history written by the real controller and ledger is clean, and each breach is found by its law.

It decides from the file alone, and shares with those who write it the law of the states and the check of the log. A bit
that is flipped in anything a run goes on from is named.
"""

import ast
import re
import shutil
from pathlib import Path
from types import ModuleType

import pytest

from stretto.core.errors import RunFolderError, StoreError
from stretto.core.records import Group
from stretto.launch.train import _MAY_CHANGE
from stretto.rollout.config import RolloutConfig
from stretto.rollout.controller import Controller
from stretto.rollout.prompts import PromptStream
from stretto.store.checkpoints import seal_files
from stretto.store.ledger.schema import PAGE
from stretto.store.totals import Membership
from stretto_report.audit import check, checksums, history, laws, presence, token_laws
from stretto_report.audit.check import check_run, print_balance, print_findings
from tests.audit.runs import RECIPE, flip_a_bit, steps, trajectories
from tests.store.make import buffered, judged, ledger_at, prompts, sampled, sql


def written(folder: Path, engine: str) -> Path:
    """Three steps over two epochs of five prompts; one group failed and was asked again, one waits, two are open."""
    (folder / "recipe.toml").write_text(RECIPE)
    config = RolloutConfig(batch_size=2, group_size=2, max_in_flight=3, max_staleness=1)
    with ledger_at(folder / "ledger.sqlite") as ledger:
        control = Controller(config, PromptStream(prompts(5), seed=1), ledger, seed=1)
        ledger.watch("standing", control.state)
        ledger.put("engines", [Membership("engine-0", "native", "here", version=3, joined_step=0)])
        ledger.put("canary", {"since": 0, "proven": [{"engine": "engine-0", "ranges": [[0, 3]]}]})
        failed = control.admit()
        assert failed is not None
        control.fail(failed, "refused")
        steps(control, ledger, 3, engine)
        tickets = [ticket for ticket in (control.admit() for _ in range(3)) if ticket is not None]
        control.finish(tickets[0], trajectories(tickets[0], 3, engine))
    return folder


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp("template"), "engine-0")


@pytest.fixture
def run_dir(template: Path, tmp_path: Path) -> Path:
    """A copy of the template."""
    for name in ("recipe.toml", "ledger.sqlite"):
        shutil.copy(template / name, tmp_path)
    return tmp_path


def test_a_run_that_kept_every_law_is_clean(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    findings = check_run(run_dir)
    assert findings.kept, findings
    assert findings.balance == {
        "issued": 20, "trained": 12, "filtered": 0, "expired": 0, "failed": 2, "in_flight": 4, "buffered": 2,
    }  # fmt: skip
    assert print_balance(run_dir) == 0
    out = capsys.readouterr().out
    assert "sum of the states" in out
    assert out.count("kept  ") == len(laws.LAWS)


BREACHES = {
    "everything issued has one state": {
        "a trajectory without a row": "DELETE FROM trajectories WHERE key = 0",
        "a state that is none": "UPDATE trajectories SET state = 'lost' WHERE key = 19",
        "an end without a reason": "UPDATE trajectories SET reason = '' WHERE key = 0",
        "trained without a step": "UPDATE trajectories SET trained_step = NULL WHERE key = 2",
        "counted as more": "UPDATE meta SET value = replace(value, '\"trained\":12', '\"trained\":14')",
    },
    "nothing is trained twice": {
        "trained in two batches": "UPDATE steps SET batch = (SELECT batch FROM steps WHERE step = 1) WHERE step = 2",
        "trained in another step": "UPDATE trajectories SET trained_step = 3 WHERE key IN (2, 3)",
        "a prompt trained twice in an epoch": (
            "UPDATE groups SET id = '0.' || (SELECT prompt_id FROM groups WHERE key = 2) || '.7',"
            " prompt_id = (SELECT prompt_id FROM groups WHERE key = 2) WHERE key = 4"
        ),
    },
    "versions grow by one": {
        "a step that is missing": "DELETE FROM steps WHERE step = 2",
        "a version that was skipped": "UPDATE steps SET version = 7 WHERE step = 3",
        "a step that was never published": "UPDATE steps SET published_version = NULL WHERE step = 2",
        "published as another version": "UPDATE steps SET published_version = 9 WHERE step = 2",
        "sampled by a version to come": "UPDATE trajectories SET newest_version = 9 WHERE key = 2",
    },
    "no group starts before its turn": {
        "admitted too early": (
            "UPDATE groups SET admitted_version = 0; UPDATE trajectories SET oldest_version = 0, newest_version = 0"
        ),
        "admitted at an older version than a group before it": "UPDATE groups SET admitted_version = 1 WHERE key = 2",
        "a token from before its group was admitted": (
            "UPDATE trajectories SET oldest_version = 0 WHERE trained_step = 3"
        ),
    },
    "no bound is broken": {
        "trained beyond the bound": (
            "UPDATE trajectories SET oldest_version = 0 WHERE trained_step = 3; DELETE FROM payloads;"
            "UPDATE steps SET oldest_trainable = 0"
        ),
        "trained by an older version": "UPDATE trajectories SET newest_version = 2 WHERE trained_step = 1",
    },
    "batches are complete": {
        "a batch that is too small": "UPDATE steps SET batch = json_remove(batch, '$[0]') WHERE step = 2",
        "trained without a verdict": "UPDATE trajectories SET reward = NULL WHERE key = 2",
        "tokens that nobody wrote": "UPDATE steps SET trained_tokens = 99 WHERE step = 1",
        "tokens that are lost": "UPDATE trajectories SET tokens = 5 WHERE key = 2",
    },
    "no prompt is skipped or repeated": {
        "a prompt that was skipped": (
            "DELETE FROM trajectories WHERE group_key = 18; DELETE FROM groups WHERE key = 18"
        ),
        "a prompt that was given up": (
            "UPDATE trajectories SET state = 'failed', reason = 'lost' WHERE group_key = 16"
        ),
        "an attempt that was left out": "UPDATE groups SET id = substr(id, 1, length(id) - 1) || '2' WHERE key = 2",
        "asked again although it was trained": (
            "UPDATE groups SET prompt_id = (SELECT prompt_id FROM groups WHERE key = 4),"
            " id = '0.' || (SELECT prompt_id FROM groups WHERE key = 4) || '.1' WHERE key = 6"
        ),
    },
    "every token was sampled by proven weights": {"unproven": "UPDATE meta SET value = replace(value, '0,3]', '0,1]')"},
}


@pytest.mark.parametrize(
    ("law", "statements"),
    [pytest.param(law, told, id=name) for law, breaches in BREACHES.items() for name, told in breaches.items()],
)
def test_a_breach_is_found_by_law(run_dir: Path, capsys: pytest.CaptureFixture[str], law: str, statements: str) -> None:
    sql(run_dir / "ledger.sqlite", statements)
    findings = check_run(run_dir)
    assert findings.breaches[law], findings
    assert print_findings(findings) == 1
    assert f"BROKEN  {law}" in capsys.readouterr().out


UNFIT = " is not what was written: its checksum does not fit"


@pytest.mark.parametrize("state", ["buffered", "trained"])
def test_a_bit_that_is_flipped_in_a_trajectory_is_named(run_dir: Path, state: str) -> None:
    name = flip_a_bit(run_dir / "ledger.sqlite", state)
    of_step = (f"the batch of step 1{UNFIT}",) if state == "trained" else ()
    breaches = check_run(run_dir).breaches
    assert breaches["every checksum fits"] == (f"trajectory {name}{UNFIT}", *of_step)
    assert [law for law, found in breaches.items() if found] == ["every checksum fits"]


SEALED = {
    "a group": ("UPDATE groups SET admitted_version = 1 WHERE key = 18", r"group 1\.\d\.0"),
    "a reward": ("UPDATE trajectories SET reward = 0.5 WHERE state = 'buffered'", r"trajectory 1\.\d\.0/0"),
    "a step": ("UPDATE steps SET oldest_trainable = -1 WHERE step = 2", "the batch of step 2"),
    "the tokens of a prompt": ("UPDATE groups SET prompt_token_ids = x'9109' WHERE key = 2", r"group 0\.\d\.\d"),
    "the tokens of a trajectory that ended untrained": (
        "UPDATE trajectories SET tokens = 9 WHERE state = 'failed'",
        r"the row of trajectory 0\.\d\.0/0",
    ),
    "a count of a step": ("UPDATE steps SET committed = 5 WHERE step = 2", "the row of step 2"),
    "a fact": ("UPDATE meta SET value = json_set(value, '$.x', 1) WHERE name = 'standing'", "the fact 'standing'"),
}


@pytest.mark.parametrize(("statement", "what"), SEALED.values(), ids=SEALED)
def test_a_number_that_is_changed_in_a_sealed_row_is_named(run_dir: Path, statement: str, what: str) -> None:
    sql(run_dir / "ledger.sqlite", statement)
    found = check_run(run_dir).breaches["every checksum fits"]
    assert found
    assert re.fullmatch(what + UNFIT, found[0])


def test_a_bit_that_is_flipped_in_a_piece_of_a_trajectory_in_flight_is_named(run_dir: Path) -> None:
    path = run_dir / "ledger.sqlite"
    [(name,)] = sql(path, "SELECT id FROM groups ORDER BY key DESC LIMIT 1")
    with ledger_at(path) as ledger:
        ledger.journal(f"{name}/1", sampled((1, 1), stop=None))
    assert check_run(run_dir).kept
    sql(path, "UPDATE partials SET payload = CAST(substr(payload, 1, 8) || x'94' || substr(payload, 10) AS BLOB)")
    assert check_run(run_dir).breaches["every checksum fits"] == (f"a piece of trajectory {name}/1{UNFIT}",)


@pytest.mark.parametrize("name", ["index", "given_back", "position"])
def test_a_position_that_lost_a_name_is_refused(run_dir: Path, name: str) -> None:
    sql(run_dir / "ledger.sqlite", "UPDATE meta SET value = replace(value, ?, ?)", f'"{name}"', '"other"')
    with pytest.raises(StoreError, match=r"ledger\.sqlite: cannot be read: the position or a batch"):
        check_run(run_dir)


def test_a_buffered_trajectory_without_its_tokens_is_named(run_dir: Path) -> None:
    sql(run_dir / "ledger.sqlite", "DELETE FROM payloads")
    found = check_run(run_dir).breaches["every checksum fits"]
    assert [sentence.partition(" is ")[2] for sentence in found] == ["buffered and its tokens are missing"] * 2


def test_a_policy_without_a_step_is_found(run_dir: Path) -> None:
    for name in ("v000009", "v000001", "v000001.mine", ".v000010.4711.partial"):
        (run_dir / "policy" / name).mkdir(parents=True)
    assert check_run(run_dir).breaches["versions grow by one"] == ("policy 9 belongs to no step on record",)


@pytest.mark.parametrize("text", ["", "[rollout]\n", "[rollout", "[rollout]\nbatch_size = 2\n"])
def test_a_recipe_that_says_nothing_of_what_was_promised_is_named(run_dir: Path, text: str) -> None:
    recipe = run_dir / "recipe.toml"
    recipe.write_text(text)
    with pytest.raises(StoreError, match=f"^{recipe}: "):
        check_run(run_dir)


def test_a_file_that_is_damaged_is_found_or_refused(run_dir: Path) -> None:
    path = run_dir / "ledger.sqlite"
    whole = path.read_bytes()
    for place in range(PAGE, len(whole), PAGE):  # the type of each page
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0xFF]) + whole[place + 1 :])
        try:
            kept = check_run(run_dir).kept
        except StoreError:
            continue
        assert not kept, f"page {place // PAGE + 1}"


def test_a_file_of_the_start_that_is_not_what_it_was_is_named_by_its_law(run_dir: Path) -> None:
    policy = run_dir / "policy" / "v000000"
    policy.mkdir(parents=True)
    weights = policy / "model.safetensors"
    weights.write_bytes(b"weights")
    (policy / "config.json").write_text("{}")
    with ledger_at(run_dir / "ledger.sqlite") as ledger:
        ledger.put("start", {"policy/v000000": seal_files(policy), "/elsewhere/reference": {}})
    findings = check_run(run_dir)
    assert findings.kept
    assert findings.notes[:2] == (  # what follows are the files of a run that this one lacks
        "recipe: not on record, so not checked",
        "/elsewhere/reference does not exist, so it is not checked",
    )
    weights.write_bytes(b"weighus")
    (policy / "config.json").unlink()
    first, second = check_run(run_dir).breaches["the start is what it was"]
    assert first == f"{policy / 'config.json'} is missing"
    assert re.fullmatch(rf"{weights} has checksum \w+, and had \w+ when the run started", second)


def test_a_recipe_that_was_edited_is_found_by_its_law_unless_a_resume_might_change_the_key(run_dir: Path) -> None:
    recipe = RECIPE + "[trainer]\nsteps = 3\nlearning_rate = 0.1\n[store]\nkeep_checkpoints = 2\n"
    with ledger_at(run_dir / "ledger.sqlite") as ledger:
        ledger.put("recipe", recipe)
    (run_dir / "recipe.toml").write_text(recipe.replace("steps = 3", "steps = 9").replace("checkpoints = 2", "n = 2"))
    assert check_run(run_dir).kept
    (run_dir / "recipe.toml").write_text(recipe.replace("0.1", "0.2") + "[sampling]\ntop_k = 5\n")
    breaches = check_run(run_dir).breaches
    assert breaches["the recipe is the one on record"] == (
        "sampling is {'top_k': 5}, on record is None",
        "trainer.learning_rate is 0.2, on record is 0.1",
    )


def test_the_checker_ignores_what_a_resume_may_change_and_nothing_else() -> None:
    of = [f"{section}.{key}" for section, keys in history.MAY_CHANGE_OF.items() for key in keys]
    assert {*history.MAY_CHANGE, *of} == set(_MAY_CHANGE)


@pytest.mark.parametrize(
    ("name", "there", "said"),
    [("nosuch", False, "does not exist"), ("nosuch", True, "holds no run"), ("nosuch" * 50, False, "does not exist")],
)
def test_a_folder_without_a_run_is_the_users_mistake(tmp_path: Path, name: str, there: bool, said: str) -> None:
    folder = tmp_path / name
    if there:
        folder.mkdir()
    with pytest.raises(RunFolderError, match=f"nosuch: {said}"):
        check_run(folder)


def test_a_ledger_of_a_loop_of_one_s_own_has_no_laws_of_a_recipe(tmp_path: Path) -> None:
    (tmp_path / "ledger.sqlite").touch()
    with pytest.raises(RunFolderError, match=r"has a ledger and no recipe.toml; give a folder of `stretto train`"):
        check_run(tmp_path)


@pytest.mark.parametrize("module", [check, checksums, token_laws, history, laws, presence])
def test_the_checker_shares_only_the_states_and_the_check_of_the_log_with_the_writers(module: ModuleType) -> None:
    tree = ast.parse(Path(str(module.__file__)).read_text())
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    ours = {f"{node.module}.{alias.name}" for node in imports for alias in node.names}
    theirs = {name for name in ours if name.startswith("stretto.") and not name.startswith("stretto_report.audit.")}
    errors, states = ("StoreError", "RunFolderError", "Problem", "UNREADABLE"), ("FINAL", "OPEN", "UNTRAINED")
    allowed = {f"stretto.core.errors.{name}" for name in errors} | {f"stretto.core.states.{name}" for name in states}
    of_check = {"stretto.core.errors.harmless", "stretto.store.lock", "stretto.store.ledger.schema.check_resting_log"}
    of_history = {f"stretto.store.ledger.schema.{name}" for name in ("needs_copy", "open_copy")}  # bytes as they are
    assert theirs <= allowed | {check: of_check, history: of_history}.get(module, set())


def test_tokens_of_an_engine_that_is_not_on_the_roster_and_tokens_of_nobody_are_found(run_dir: Path) -> None:
    path, law = run_dir / "ledger.sqlite", "every token has its engine"
    one = judged("9.9.0/0", versions=(3, 3), engines=(("engine-0", 1), ("spot", 2)))
    with ledger_at(path) as ledger:
        buffered(ledger, Group("9.9.0", prompts(10)[9], 3, (one,)))
    assert check_run(run_dir).breaches[law] == (
        "9.9.0/0 has tokens of spot, which is not on the roster",
        "9.9.0/0 has 2 sampled tokens, its engines wrote (('engine-0', 1), ('spot', 2))",
    )


def test_tokens_that_no_engine_is_on_record_for_are_not_proven(run_dir: Path) -> None:
    with ledger_at(run_dir / "ledger.sqlite") as ledger:
        buffered(ledger, Group("9.9.0", prompts(10)[9], 3, (judged("9.9.0/0", versions=(3, 3)),)))
    assert check_run(run_dir).breaches["every token was sampled by proven weights"] == (
        "9.9.0/0 has a token of no engine at version 3, which it had not proven",
    )


@pytest.mark.parametrize("ended", ["", "filtered", "expired", "failed"])
def test_a_proof_that_is_taken_back_breaks_the_law_for_what_is_trained_or_may_still_be(
    run_dir: Path, ended: str
) -> None:
    law, proven = "every token was sampled by proven weights", [{"engine": "engine-0", "ranges": [[0, 3]]}]
    with ledger_at(run_dir / "ledger.sqlite") as ledger:
        ledger.put("canary", {"since": 0, "proven": proven, "withdrawn": [{"engine": "engine-0", "version": 3}]})
    if ended:
        sql(run_dir / "ledger.sqlite", f"UPDATE trajectories SET state = '{ended}' WHERE state = 'buffered'")
    assert len(check_run(run_dir).breaches[law]) == (0 if ended else 2)
