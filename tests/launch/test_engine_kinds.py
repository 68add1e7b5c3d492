"""Promises about `engine.kind`, before a process starts: what a make of server cannot do is refused with the remedy,
all at once; an interpreter without it and a server that is silent or another model's are named with what is needed."""

import socket
from pathlib import Path
from typing import Any

import pytest

from stretto.core.errors import RecipeError, UserError
from stretto.launch.assemble.specs import Endpoints, engine_specs
from stretto.launch.preflight.checks import check_engine_keys
from stretto.launch.preflight.devices import engine_parts
from stretto.launch.preflight.plan import make_plan
from stretto.launch.recipe.recipe import Recipe, validate
from stretto.model.hf.build import build_policy
from stretto.model.hf.config import BuildConfig
from stretto_app.extensions.preflight.estimates import estimate_memory
from stretto_servers import checks, keys
from tests.launch.vllm_server import replies_of, replies_with_logprobs, serving

Tree = dict[str, Any]
BUILD: Tree = {"hidden_size": 16, "layers": 1, "heads": 1, "kv_heads": 1, "head_dim": 32, "intermediate_size": 16}


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("policy") / "tiny"
    build_policy(BuildConfig(**BUILD, context_length=32), folder, seed=1)
    return folder


def recipe_of(policy: Path, engine: Tree, **sections: Any) -> Recipe:
    tree = {
        "model": {"path": str(policy)},
        "task": {"kind": "arithmetic", "operands_max": 3, "held_out": 16, "prompts": 64, "demonstrations": 0},
        "trainer": {},
        "sampling": {"max_tokens": 16},
        "evaluation": {"prompts": 8},
        "engine": engine,
    }
    return validate(tree | sections, "recipe.toml")


def refused(policy: Path, engine: Tree, **sections: Any) -> list[str]:
    with pytest.raises(UserError) as caught:
        make_plan(recipe_of(policy, engine, **sections))
    assert isinstance(caught.value, RecipeError)
    assert caught.value.exit_code == 2
    return str(caught.value).splitlines()


def interpreter(folder: Path, says: str, code: int = 0) -> str:
    """A program that answers what an interpreter would."""
    path = folder / "python"
    path.write_text(f"#!/bin/sh\necho '{says}'\nexit {code}\n")
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize("key", ["python", "arguments", "addresses"])
def test_the_embedded_engine_has_no_keys_of_a_server(policy: Path, key: str) -> None:
    value = "/bin/python" if key == "python" else ["127.0.0.1:8000"]
    (told,) = refused(policy, {key: value})
    remedy = 'only engine.kind = "vllm" or "sglang" has it'
    assert told == f'engine.{key}: is given, and engine.kind is "native"; {remedy}'


def test_all_that_a_make_cannot_do_is_named_at_once(policy: Path) -> None:
    sampling = {"max_tokens": 16, "top_p": 0.9, "top_k": 5, "min_p": 0.1}
    told = refused(policy, {"kind": "sglang", "batching": "rounds"}, sampling=sampling, trainer={"lora": {}})
    assert [line.partition(":")[0] for line in told] == [
        "engine.python",
        "engine.batching",
        "trainer.lora",
        "sampling.top_p",
        "sampling.top_k",
        "sampling.min_p",
    ]
    assert "SGLang 0.5.20 or newer, or give engine.addresses" in told[0]
    assert 'engine.kind = "native" for a run that can be repeated' in told[1]
    assert told[3].endswith("0.9, and the log-probabilities of SGLang do not follow it; 1, or another engine.kind")


def test_servers_are_started_or_given_and_each_address_is_one_engine(policy: Path) -> None:
    given = ["127.0.0.1:8000", "node", "127.0.0.1:8000", "[::1]:99999"]
    told = refused(policy, {"kind": "vllm", "python": "/bin/sh", "addresses": given, "count": 3})
    assert told == [
        "engine.python: is given beside engine.addresses, whose servers run already; give one of both",
        "engine.addresses: 'node'; host:port is needed, as in \"127.0.0.1:8000\"",
        "engine.addresses: '[::1]:99999'; host:port is needed, as in \"127.0.0.1:8000\"",
        "engine.addresses: 127.0.0.1:8000 is given twice; each server is one engine",
        "engine.count: 3, and engine.addresses has 4; leave it out: each address is one engine",
    ]
    assert recipe_of(policy, {"kind": "vllm", "addresses": ["a:1", "b:2"]}).engine.count == 2


def test_machines_cannot_bring_engines_beside_servers_at_addresses(policy: Path) -> None:
    engine = {"kind": "vllm", "addresses": ["127.0.0.1:1"]}
    for cluster in ({"listen": "127.0.0.1:0"}, {"listen": "127.0.0.1:0", "placer": "given"}, {"placer": "ray"}):
        (told,) = refused(policy, engine, cluster=cluster)
        assert told.startswith("engine.addresses: is given, and machines would join with engines of their own")
    lines = refused(policy, engine, cluster={"listen": "127.0.0.1:0"}, trainer={"ranks": 2, "remote_ranks": 1})
    assert not [line for line in lines if "machines would join" in line]


@pytest.mark.parametrize(
    ("kind", "says", "code", "message"),
    [
        ("vllm", "0.31.4", 0, "has vLLM 0.31.4; vLLM 0.32 or newer is needed"),
        ("sglang", "0.5.9+cpu", 0, "has SGLang 0.5.9+cpu; SGLang 0.5.20 or newer is needed"),
        ("vllm", "", 0, "does not have vLLM; install vLLM 0.32 or newer into it: "),
        ("vllm", "", 3, "is no working interpreter: exit code 3"),
    ],
)
def test_an_interpreter_without_the_server_is_named_with_what_it_has(
    policy: Path, tmp_path: Path, kind: str, says: str, code: int, message: str
) -> None:
    (told,) = refused(policy, {"kind": kind, "python": interpreter(tmp_path, says, code)})
    assert told.startswith(f"engine.python: {tmp_path}/python ")
    assert message in told


@pytest.mark.parametrize("says", ["0.32.0", "0.33.0rc1", "1.0"])
def test_an_interpreter_with_the_server_is_taken(policy: Path, tmp_path: Path, says: str) -> None:
    plan = make_plan(recipe_of(policy, {"kind": "vllm", "python": interpreter(tmp_path, says)}))
    native = make_plan(recipe_of(policy, {}))
    more = estimate_memory(plan).engines - estimate_memory(native).engines
    assert more + engine_parts(native)["step"] == 2760 << 20  # the processes of vLLM beside the adapter


def test_an_interpreter_that_is_no_program_or_never_ends_is_named(
    policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (told,) = refused(policy, {"kind": "vllm", "python": str(tmp_path / "nowhere")})
    assert f"{tmp_path}/nowhere is no program" in told
    monkeypatch.setattr(keys, "_ASK_SECONDS", 0.1)
    path = tmp_path / "python"
    path.write_text("#!/bin/sh\nexec sleep 60\n")
    path.chmod(0o755)
    (told,) = refused(policy, {"kind": "vllm", "python": str(path)})
    assert "timed out after 0.1 seconds" in told


def test_a_machine_without_engines_needs_neither_their_interpreter_nor_their_attention(tmp_path: Path) -> None:
    build_policy(BuildConfig(**(BUILD | {"head_dim": 16}), context_length=32), tmp_path / "narrow", seed=1)
    engine = {"kind": "vllm", "python": "/only/where/engines/run/python", "device": "cpu"}
    make_plan(recipe_of(tmp_path / "narrow", engine, cluster={"placer": "given", "listen": "127.0.0.1:0"}))
    told = refused(tmp_path / "narrow", engine, cluster={"listen": "127.0.0.1:0"})
    assert told[0].startswith("engine.python: /only/where/engines/run/python is no program")


def test_heads_that_the_attention_on_a_processor_lacks_are_named_with_those_it_has(tmp_path: Path) -> None:
    build_policy(BuildConfig(**(BUILD | {"head_dim": 16}), context_length=32), tmp_path / "narrow", seed=1)
    engine = {"kind": "vllm", "python": interpreter(tmp_path, "0.32.0"), "device": "cpu"}
    (told,) = refused(tmp_path / "narrow", engine)
    allowed = "32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512"
    problem = "16, for which vLLM has no attention on a processor"
    assert told == f"{tmp_path}/narrow: head_dim: {problem}; allowed: {allowed}"


def test_the_deadlines_of_a_server_are_those_of_the_recipe(policy: Path, tmp_path: Path) -> None:
    engine, seconds = {"kind": "vllm", "python": interpreter(tmp_path, "0.32.0")}, {"answer": 901.0, "load": 301.0}
    plan = make_plan(recipe_of(policy, engine, deadlines=seconds))
    (spec,) = engine_specs(plan.recipe, policy, Endpoints("mailbox", tmp_path, tmp_path))
    assert (spec.token_seconds, spec.load_seconds) == (450.5, 301.0)  # tokens: before the conductor, which waits 901 s


def test_a_server_of_the_policys_tokenizer_is_taken_and_is_no_memory_of_ours(policy: Path) -> None:
    with serving(replies_of(policy)) as address:
        plan = make_plan(recipe_of(policy, {"kind": "vllm", "addresses": [address]}))
        assert estimate_memory(plan).engines == 350 << 20  # the adapter


def test_a_server_with_another_tokenizer_is_named_with_both_digests(policy: Path) -> None:
    replies = replies_of(policy)
    tokens = replies["/tokenize"]
    other = {"/tokenize": lambda asked: {"tokens": [token + 1 for token in tokens(asked)["tokens"]]}}
    with serving(replies | other) as address:
        (told,) = refused(policy, {"kind": "vllm", "addresses": [address]})
    assert told.startswith(f"engine.addresses: {address} serves {policy}, whose tokenizer (digest ")
    assert told.count("digest ") == 2
    assert told.endswith("start it with the policy's own folder")


@pytest.mark.parametrize("sampling", [{"temperature": 0.8}, {"top_k": 20}])
def test_a_server_whose_logprobs_are_not_of_the_runs_sampling_is_named_with_its_flag(
    policy: Path, sampling: dict[str, Any]
) -> None:
    with serving(replies_of(policy) | replies_with_logprobs(raw=True)) as address:
        engine = {"kind": "vllm", "addresses": [address]}
        make_plan(recipe_of(policy, engine))
        make_plan(recipe_of(policy, engine, sampling={"max_tokens": 16} | sampling), trains=False)
        (told,) = refused(policy, engine, sampling={"max_tokens": 16} | sampling)
    assert told.startswith(f"engine.addresses: {address} reports log-probabilities of tokens as if ")
    assert "--logprobs-mode processed_logprobs" in told
    with serving(replies_of(policy) | replies_with_logprobs(raw=False)) as address:
        make_plan(recipe_of(policy, {"kind": "vllm", "addresses": [address]}, sampling={"max_tokens": 16} | sampling))


def test_a_server_that_cannot_be_asked_for_its_logprobs_is_told_as_such(policy: Path) -> None:
    with serving(replies_of(policy) | {"/inference/v1/generate": None}) as address:
        (told,) = refused(policy, {"kind": "vllm", "addresses": [address]}, sampling={"max_tokens": 16, "top_k": 20})
    assert told.startswith(
        f"engine.addresses: {address} does not sample and score as its log-probabilities are checked"
    )
    assert "status 404" in told
    assert told.endswith("start it with the flags of docs/how_to/servers.md")


def test_a_server_of_another_model_with_the_same_tokenizer_is_named_with_both_digests_and_what_differs(
    policy: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    build_policy(BuildConfig(**(BUILD | {"hidden_size": 32, "layers": 2}), context_length=32), other, seed=1)
    models = {"/v1/models": {"data": [{"id": "m", "root": str(other), "max_model_len": 32}]}}
    with serving(replies_of(policy) | models) as address:
        (told,) = refused(policy, {"kind": "vllm", "addresses": [address]})
    assert told.startswith(f"engine.addresses: {address} serves {other} (digest ")
    assert f", which is not the policy {policy} (digest " in told
    assert "hidden_size 32 in place of 16" in told
    assert "num_hidden_layers 2 in place of 1; start it with the policy's own folder" in told


def test_a_server_whose_model_is_no_folder_of_this_machine_is_known_by_its_architecture(policy: Path) -> None:
    replies = replies_of(policy) | {
        "/server_info": {"version": "0.5.23"},
        "/model_info": {"model_path": "org/x", "weight_version": "1", "architectures": ["LlamaForCausalLM"]},
    }
    with serving(replies) as address:
        (told,) = refused(policy, {"kind": "sglang", "addresses": [address]})
    assert f"{address} serves org/x (digest " in told
    assert "architectures ['LlamaForCausalLM'] in place of ['Qwen3ForCausalLM']" in told


def test_a_server_with_too_short_a_context_is_named_with_what_is_needed(policy: Path) -> None:
    with serving(replies_of(policy, context=17)) as address:
        (told,) = refused(policy, {"kind": "vllm", "addresses": [address]})
    assert f"{address} serves {policy} with a context of 17 tokens; prompt and completion need " in told


def test_an_old_server_is_named_with_the_endpoint_it_lacks_and_the_release_that_has_it(policy: Path) -> None:
    with serving(replies_of(policy) | {"/weight_info": None}) as address:
        (told,) = refused(policy, {"kind": "vllm", "addresses": [address]})
    assert "answers /weight_info with status 404" in told
    assert "vLLM 0.32 or newer" in told


def test_addresses_without_an_answer_are_all_named_in_time(policy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "_ANSWER_SECONDS", 0.2)
    with socket.socket() as silent, socket.socket() as closed:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        closed.bind(("127.0.0.1", 0))
        given = [f"127.0.0.1:{held.getsockname()[1]}" for held in (silent, closed)]
        told = refused(policy, {"kind": "vllm", "addresses": given})
    assert f"waited 0.2 s for /version of the server {given[0]} and gave up" in told[0]
    assert f"the server {given[1]} does not listen" in told[1]


def test_weights_by_broadcast_to_servers_on_gpus_that_stretto_starts_are_refused(policy: Path, tmp_path: Path) -> None:
    engine = {"kind": "sglang", "python": interpreter(tmp_path, "0.6.0"), "device": "cuda"}
    recipe = recipe_of(policy, engine, weights={"medium": "broadcast"})
    with pytest.raises(RecipeError, match=r'weights.medium: "broadcast" .* NCCL refuses two ranks, .*; "auto"'):
        check_engine_keys(recipe)
