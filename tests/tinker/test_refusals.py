"""What is not right, torn, or not served: one sentence with the place, and never a 5xx."""

import contextlib
import errno
import os
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.core.errors import RecipeError, RefusedRequest
from stretto_app.extensions.commands.tinker import tinker
from stretto_tinker.compute.base import LocalBackend
from stretto_tinker.http.exchange import LARGEST_BODY
from stretto_tinker.wire.datums import numbered, parse_job
from tests.tinker.speaking import Client, a_client, job, told
from tests.tinker.test_training import data_for

_GOOD = data_for("cross_entropy")
_TOKENS = {"target_tokens": [4, 5, 6]}


@pytest.mark.parametrize(
    ("data", "loss", "config", "sentence"),
    [
        ([([3, 4, 5], {"target_tokens": [4, 5]})], "cross_entropy", {}, "data[0].target_tokens: the shape (2,); (3,)"),
        ([([3, 4, 5], {})], "cross_entropy", {}, "data[0].target_tokens: missing"),
        ([([3, 4, 99], _TOKENS)], "cross_entropy", {}, "data[0].model_input: token 99; 0 to 21"),
        ([([3, 4, -1], _TOKENS)], "cross_entropy", {}, "data[0].model_input: token -1"),
        ([([], {"target_tokens": []})], "cross_entropy", {}, "data[0].model_input: 0 tokens; 1 to 192"),
        ([([3] * 200, {"target_tokens": [3] * 200})], "cross_entropy", {}, "200 tokens; 1 to 192, the context"),
        ([([3, 4, 5], {**_TOKENS, "weights": [1.0, float("nan"), 1.0]})], "cross_entropy", {}, "NaN or infinite"),
        ([([3, 4, 5], {**_TOKENS, "weigths": [1.0, 1.0, 1.0]})], "cross_entropy", {}, "did you mean 'weights'?"),
        ([([3, 4, 5], {"target_tokens": [4.0, 5.0, 6.5]})], "cross_entropy", {}, "type float32; int64"),
        ([([3, 4, 5], _TOKENS)], "ppo", {}, "data[0].logprobs: missing"),
        (_GOOD, "ppoo", {}, "did you mean 'ppo'?"),
        (_GOOD, "stable_reinforce", {}, "stable_reinforce is not served: it reads what the sampler of its makers"),
        (_GOOD, "dpo", {}, "dpo is not served: it reads pairs; the cookbook's is a function, on the client's side"),
        (_GOOD, "custom", {}, "custom losses run on the client's side"),
        (_GOOD, "cross_entropy", {"beta": 1.0}, "loss_fn_config.beta: no setting of cross_entropy"),
        (data_for("dro"), "dro", {"betta": 1.0}, "did you mean 'beta'?"),
        ([], "cross_entropy", {}, "data: no datum"),
    ],
)
def test_wrong_data_fail_their_own_request_with_a_sentence(
    data: Any, loss: str, config: dict[str, float], sentence: str, client: Client, id: str
) -> None:
    failed = client.result(client.forward_backward(id, 1, data, loss, **config))
    assert failed["category"] == "user"
    assert sentence in failed["error"]
    assert client.output(client.forward_backward(id, 2, _GOOD)).loss > 0


@pytest.mark.parametrize(
    ("adam", "sentence"),
    [
        ({"learning_rate": -1.0}, "adam_params.learning_rate: -1.0"),
        ({"beta1": 1.0}, "adam_params.beta1: 1.0"),
        ({"eps": -1e-8}, "adam_params.eps"),
        ({"eps": 0.0}, "adam_params.eps: 0; above 0"),
        ({"eps": 1e-60}, "adam_params.eps: 1e-60, too small for float32; at least 1.17549e-38"),
        ({"eps": 1e-40}, "adam_params.eps: 1e-40, too small for float32; at least 1.17549e-38"),
        ({"learning_rate": 10**400}, "adam_params.learning_rate: 1000"),
        ({"eps": 1e39}, "adam_params.eps: 1e+39; 0 to 1.70141e+38"),  # infinite in float32
        ({"weight_decay": 1e5}, "100000: a step would take more than the whole weight; at most 100, 1 / learning"),
    ],
)
def test_wrong_numbers_of_a_step_are_refused(adam: dict[str, float], sentence: str, client: Client, id: str) -> None:
    client.forward_backward(id, 1, _GOOD)
    assert sentence in client.result(client.step(id, 2, **adam))["error"]


@pytest.mark.parametrize("further", [{}, {"learning_rate": 1e-2, "beta1": 0.8, "eps": 1e-8}])
def test_the_settings_of_adamw_have_two_spellings(further: dict[str, float], client: Client, id: str) -> None:
    norms = list[float]()
    for seq, spelling in ((1, {"adam_params": further}), (3, {"optimizer_params": {"type": "adamw", **further}})):
        client.output(client.forward_backward(id, seq, _GOOD))
        step = {"model_id": id, "seq_id": seq + 1, **spelling}
        norms.append(client.result(client.post("optim_step", step).json()["request_id"])["metrics"]["grad_norm"])
    assert all(norm > 0 for norm in norms)
    wrong = {"model_id": id, "seq_id": 5, "optimizer_params": {"type": "adamw", "beta1": 1.0}}
    refused = client.result(client.post("optim_step", wrong).json()["request_id"])
    assert "optimizer_params.beta1: 1.0" in refused["error"]


def test_bodies_that_are_none(address: str, client: Client, id: str) -> None:
    for raw in (b"", b"\n", b"\xff\xff\xff", b"not protobuf at all", job(id, 1, _GOOD)[:8]):
        reply = client.post("forward_backward", raw)
        assert reply.status_code in (400, 404), (raw[:20], reply.text)
    headers = {"x-api-key": client.key, "content-type": "application/json"}
    for raw, sentence in (
        (b"{", "no JSON"),
        (b"[]", "body"),
        (b'{"model_id": 3}', "model_id"),
        (b"{}", "model_id: missing"),
    ):
        reply = httpx.post(f"{address}/api/v1/optim_step", content=raw, headers=headers)
        assert reply.status_code == 400
        assert sentence in reply.json()["detail"]
    body = {"model_id": id, "seq_id": 1, "adam_params": {}, "momentum_of_tomorrow": 3}
    refused = client.result(told(client.post("optim_step", body))["request_id"])
    assert "momentum_of_tomorrow: a field that is not served" in refused["error"]
    told(client.post("get_info", {"model_id": id, "something_new": None}))


@pytest.mark.parametrize("sentence", ["body: too large to be read", "body: no protobuf message"])
def test_a_forward_backward_that_cannot_be_read_fails_with_the_step_behind_it(
    sentence: str, client: Client, id: str
) -> None:
    """Its number is at the beginning of its body, and the client has counted it."""
    client.output(client.forward_backward(id, 1, _GOOD))
    whole = job(id, 2, _GOOD)
    body = whole + bytes(LARGEST_BODY) if "large" in sentence else whole[: len(whole) // 2]
    asked = told(client.post("forward_backward", body))["request_id"]
    assert sentence in client.result(asked)["error"]
    assert told(client.post("forward_backward", body))["request_id"] == asked  # it may come again
    assert f"forward_backward 2 before this step failed: {sentence}" in client.result(client.step(id, 3))["error"]
    client.output(client.forward_backward(id, 4, _GOOD))
    assert client.result(client.step(id, 5))["metrics"]["grad_norm"] > 0


def test_a_forward_alone_that_is_too_large_does_not_fail_the_step_behind_it(client: Client, id: str) -> None:
    client.output(client.forward_backward(id, 1, _GOOD))
    body = job(id, 2, [([3] * (LARGEST_BODY // 4), _TOKENS)], forward_only=True)
    assert "body: too large" in client.result(told(client.post("forward_backward", body))["request_id"])["error"]
    assert client.result(client.step(id, 3))["metrics"]["grad_norm"] > 0


@given(st.integers(1, 2**31 - 1), st.integers(1, 40))
def test_the_beginning_of_a_body_names_its_request_or_nothing(seq: int, size: int) -> None:
    found = numbered(job("m:train:0", seq, _GOOD)[:size])
    named = parse_job(found)
    assert (named.model_id, named.seq_id, named.data) == (("m:train:0", seq, ()) if found else ("", 0, ()))
    assert bool(found) == (size >= len(job("m:train:0", seq, [], "")) - 4)  # two fields of two bytes are behind it


@given(st.binary(max_size=200))
def test_no_bytes_break_the_decoder(raw: bytes) -> None:
    with contextlib.suppress(RefusedRequest):
        parse_job(raw).datums()


@given(st.data())
def test_no_torn_request_breaks_the_decoder(data: st.DataObject) -> None:
    whole = bytearray(job("m:train:0", 3, _GOOD))
    for _ in range(data.draw(st.integers(1, 5))):
        at = data.draw(st.integers(0, len(whole) - 1))
        whole[at] = data.draw(st.integers(0, 255))
    with contextlib.suppress(RefusedRequest):
        parse_job(bytes(whole)).datums()


def test_a_body_of_a_gigabyte_is_refused_before_it_is_sent(address: str, client: Client) -> None:

    def gigabyte() -> Any:
        for _ in range(1024):
            yield bytes(1 << 20)

    headers = {"x-api-key": client.key, "content-length": str(1 << 30), "expect": "100-continue"}
    try:
        reply = httpx.post(f"{address}/api/v1/forward_backward", content=gigabyte(), headers=headers, timeout=60)
    except httpx.TransportError:
        pass  # the connection was closed before all of it was sent
    else:
        assert reply.status_code == 413
        assert f"{LARGEST_BODY:,} bytes, which is the limit" in reply.text
    told(client.get("get_server_capabilities"))


def test_futures_that_were_never_issued(client: Client, id: str) -> None:
    for asked in (f"{id}:77", "nothing", "", "x" * 10_000, f"{client.session}:sample:0:0"):
        reply = client.post("retrieve_future", {"request_id": asked})
        assert reply.status_code == 404, reply.text
        assert len(reply.text) < 500


@pytest.mark.parametrize(
    "path",
    ["tinker://../weights/x", "tinker://a/weights/../x", "tinker://a/b/c", "/etc/passwd", "tinker://a/weights/.x", ""],
)
def test_paths_that_are_none(path: str, client: Client) -> None:
    body = {"session_id": client.opened(), "model_seq_id": 5, "path": path, "optimizer": True}
    assert client.post("load_weights", body).status_code in (400, 404)
    assert client.post("weights_info", {"tinker_path": path}).status_code in (400, 404)
    sampler = {"session_id": client.opened(), "sampling_session_seq_id": 5, "model_path": path}
    assert client.post("create_sampling_session", sampler).status_code in (400, 404)


@pytest.mark.parametrize("name", ["../up", "a/b", "", ".hidden", "x" * 200, "naïve"])
def test_names_that_are_none(name: str, client: Client, id: str) -> None:
    assert "path" in client.save(id, 1, name)["error"]


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"num_samples": 0}, "num_samples: 0; 1 to"),
        ({"sampling_params": {"temperature": -1}}, "sampling_params.temperature"),
        ({"prompt": {"chunks": [{"type": "image", "data": "x", "format": "png"}]}}, "a chunk of the kind 'image'"),
        ({"record_stability_info": True}, "record_stability_info: is not served"),
        ({"prompt_logprobs_last_n": 9}, "prompt_logprobs_last_n: 9"),
    ],
)
def test_wrong_wishes_of_samples_are_refused_at_once(change: dict[str, Any], sentence: str, client: Client) -> None:
    body = {"sampling_session_id": client.sampler(0), "seq_id": 0, "prompt": {"chunks": [{"tokens": [3, 4]}]}}
    reply = client.post("asample", {**body, "sampling_params": {"max_tokens": 3}, **change})
    assert (reply.status_code, sentence in reply.json()["detail"]) == (400, True), reply.text


def test_wrong_prompts_fail_their_own_request(client: Client) -> None:
    sampler = client.sampler(0)
    asked = [client.sample(sampler, seq, prompt) for seq, prompt in enumerate([[], [99], [3] * 192, [3, 4]])]
    errors = [client.fetch(one) for one in asked]
    assert ["error" in reply.json() for reply in errors[:3]] == [True] * 3
    assert "protobuf" in errors[3].headers["content-type"]


def test_what_is_not_served_says_its_name_and_why(client: Client) -> None:
    for path in ("auth/token", "create_custom_loss", "copy_weights"):
        assert client.post(path).json()["detail"].startswith(f"{path} is not served: ")
    assert "no such path is known here" in client.post("tomorrow").json()["detail"]
    id = client.create()
    dimuon = {
        "session_id": client.session,
        "model_seq_id": 3,
        "base_model": "base",
        "optimizer_config": {"type": "dimuon"},
    }
    assert "'dimuon' is not served" in client.post("create_model", dimuon).json()["detail"]
    other = {"session_id": client.session, "model_seq_id": 3, "base_model": "Qwen/Qwen3-8B"}
    assert "is not served here; the model is 'base'" in client.post("create_model", other).json()["detail"]
    age = client.save(id, 1, "x", "save_weights_external", age_encryption_recipients=["age1..."])
    assert "encryption (age) is not served" in age["error"]
    kind = client.save(id, 2, None, "save_weights_for_sampler", sampling_session_seq_id=50, kind="tomorrow")
    assert "kind: 'tomorrow' is not served; snapshot or inflight" in kind["error"]
    token = {
        "model_id": id,
        "seq_id": 3,
        "path": f"tinker://{id}/weights/x",
        "optimizer": True,
        "weights_access_token": "t",
    }
    refused = client.result(told(client.post("load_weights", token))["request_id"])
    assert "weights_access_token: is not served: " in refused["error"]
    project = {"tags": [], "user_metadata": {}, "sdk_version": "test", "project_id": "p"}
    assert "project_id: is not served: there are no projects" in client.post("create_session", project).json()["detail"]
    both = {"model_id": id, "seq_id": 4, "adam_params": {"learning_rate": 1e-2}, "optimizer_params": {"type": "adamw"}}
    assert (
        "optimizer_params: given together with adam_params"
        in client.result(client.post("optim_step", both).json()["request_id"])["error"]
    )
    assert "unload_model is not served: models leave the memory" in client.post("unload_model").json()["detail"]


def test_a_full_disk_fails_the_checkpoint_and_nothing_else(
    backend: LocalBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with a_client(backend, tmp_path) as (client, _):
        id = client.create()
        client.output(client.forward_backward(id, 1, _GOOD))
        client.result(client.step(id, 2))
        mkdir = Path.mkdir

        def full(self: Path, *args: Any, **more: Any) -> None:
            if self.name.endswith(".partial"):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self))
            mkdir(self, *args, **more)

        monkeypatch.setattr(Path, "mkdir", full)
        failed = client.save(id, 3, "late")
        monkeypatch.undo()
        assert failed["category"] == "server"
        assert "No space left on device" in failed["error"]
        assert not list((tmp_path / "weights").rglob("late*"))
        assert client.save(id, 4, "late")["path"].endswith("/late")
        assert client.output(client.forward_backward(id, 5, _GOOD)).loss > 0


def test_numbers_that_overflow_fail_the_request_and_leave_the_model(client: Client, id: str) -> None:
    before = client.output(client.forward_backward(id, 1, _GOOD, forward_only=True)).loss
    tokens, inputs = data_for("importance_sampling", sequences=1)[0]
    wild = {**inputs, "advantages": np.full(len(tokens), 3e38, np.float32)}
    assert (
        "the loss is" in client.result(client.forward_backward(id, 2, [(tokens, wild)], "importance_sampling"))["error"]
    )
    assert client.output(client.forward_backward(id, 3, _GOOD, forward_only=True)).loss == before


@pytest.mark.parametrize(
    "setting", ["trainer.threads=4", "trainer.learning_rate=1", "engine.dtype=bfloat16", "engine.on_update=keep"]
)
def test_a_setting_that_nothing_reads_is_refused(setting: str, model: Path, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="has no meaning for a server"):
        tinker(model, host="127.0.0.1", port=0, folder=tmp_path, overrides=[setting])


_WRONG_STEPS: list[dict[str, object]] = [
    {"learning_rate": -1.0},
    {"learning_rate": None},
    {"beta1": 1.0},
    {"learning_rat": 0.1},
    {"eps": "x"},
]


@pytest.mark.parametrize(
    ("path", "fields", "sentence"),
    [
        ("load_weights", {"path": "tinker://nope/weights/x", "optimizer": True}, "there are no weights"),
        ("load_weights", {"path": "nope", "optimizer": True}, "is no path of weights"),
        ("load_weights", {"path": 5, "optimizer": True}, "path: "),
        ("load_weights", {}, "path"),
        ("save_weights", {"path": "x", "ttl_seconds": 60}, "ttl_seconds: "),
        ("save_weights", {"path": "a/b"}, "letters, digits"),
        ("save_weights", {"path": "x", "later": 1}, "later: a field that is not served"),
        ("save_weights_for_sampler", {"path": ["x"]}, "path: "),
        *(("optim_step", {"adam_params": wrong}, "adam_params." + next(iter(wrong))) for wrong in _WRONG_STEPS),
        ("optim_step", {"adam_params": None, "optimizer_params": {"type": "dimuon"}}, "dimuon"),
    ],
)
def test_a_request_that_is_refused_has_its_number_and_those_behind_it_go_on(
    path: str, fields: dict[str, Any], sentence: str, address: str, client: Client, id: str
) -> None:
    """The client has counted it. The gradient before it stays."""
    client.output(client.forward_backward(id, 1, _GOOD))
    body = {"model_id": id, "seq_id": 2, **fields}
    asked = told(client.post(path, body))["request_id"]
    assert sentence in client.result(asked)["error"]
    assert told(client.post(path, body))["request_id"] == asked  # it may come again
    assert client.post(path, {**body, "type": "another"}).status_code == 422
    assert client.result(client.step(id, 3))["metrics"]["grad_norm"] > 0
    assert Client(address, "tml-foreign").post(path, {**body, "seq_id": 4}).status_code in (400, 404)
    assert client.output(client.forward_backward(id, 4, _GOOD)).loss > 0


@pytest.mark.parametrize("seal", ["0" * 64, "%C3%A9", "%FF", "%E2%82%AC" * 64])
@pytest.mark.parametrize("until", ["1", "99999999999", "%D9%A1", "-1", "x"])
def test_an_address_with_a_wrong_seal_names_nothing(until: str, seal: str, address: str) -> None:
    """Anybody may try one, without a key: there is no such file, in whatever letters."""
    for kind in ("archives", "files"):
        reply = httpx.get(f"{address}/{kind}/{until}/{seal}/a:train:0/weights/one/adapter_model.safetensors")
        assert reply.status_code == 404


def test_the_seal_of_an_address_is_for_its_checkpoint_and_its_time(address: str) -> None:
    client = Client(address, "tml-sealed")
    model = client.create()
    for seq, name in enumerate(("one", "other"), start=1):
        client.save(model, seq, name)
    one, other = (
        urlsplit(client.get(f"training_runs/{model}/checkpoints/weights/{name}/archive").headers["location"])
        for name in ("one", "other")
    )
    assert httpx.get(one.geturl()).status_code == 200
    _, kind, until, seal, place = one.path.split("/", 4)
    wrong = [
        (until, other.path.split("/", 4)[3], place),
        (until, "0" * len(seal), place),
        (str(int(until) + 1), seal, place),
        (until, seal, other.path.split("/", 4)[4]),
    ]
    for parts in wrong:
        path = "/".join(("", kind, *parts))
        assert httpx.get(one._replace(path=path).geturl()).status_code == 404, path
