"""Bodies and downloads: no reply is a 5xx, few bytes make no large array, an archive leaves nothing behind."""

import random
import tarfile
import tempfile
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from starlette.routing import Route

from stretto.core.errors import RefusedRequest
from stretto_tinker.serve import TinkerServer
from stretto_tinker.wire import schema
from stretto_tinker.wire.bodies import TargetIds
from stretto_tinker.work.sampling import dense_targets
from tests.tinker.speaking import Client, job, told


def test_few_bytes_do_not_make_a_large_array(client: Client, id: str) -> None:
    for seq, (rows, columns) in enumerate([(1, 2**21), (1, 2**26), (2**31, 2**31)], 1):
        message = schema.parse("ForwardBackwardRequest", job(id, seq, [([3], {})]))
        cells = message.data[0].loss_fn_inputs.add(key="target_tokens").value
        cells.dtype = 2
        cells.shape.extend([rows, columns])
        cells.sparse_csr.crow_indices = np.zeros(2, np.int64).tobytes()
        failed = client.result(told(client.post("forward_backward", message.SerializeToString()))["request_id"])
        assert failed["category"] == "user"
        assert "at most" in failed["error"]


# Bodies

_ANY = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)
_FIELDS = [
    *("session_id", "model_id", "path", "seq_id", "model_seq_id", "sampling_session_seq_id", "sampling_session_id"),
    *("request_id", "limit", "ttl_seconds", "target", "prev_cursor", "cloned_sampler_id", "prompt", "optimizer"),
    *("sampling_params", "num_samples", "base_model", "lora_config", "rank", "user_metadata", "reason", "timeout"),
    *("display_name", "adam_params", "tinker_path", "retrieved_request_ids", "tags"),
]


def test_no_body_on_any_path_is_an_error_of_the_server(server: tuple[str, TinkerServer]) -> None:
    address, running = server
    client = Client(address, "tml-fuzz")
    model, sampler = client.create(), client.sampler(0)
    client.save(model, 1, "x")
    known = st.sampled_from([client.session, model, sampler, f"tinker://{model}/weights/x", f"{model}:0"])
    bodies = st.dictionaries(st.sampled_from(_FIELDS), known | _ANY, max_size=5)
    routes = [route for route in running.app._app.routes if isinstance(route, Route)]
    paths = [
        (method, route.path.replace("{run}", model).replace("{kind}", "weights").replace("{name}", "x"))
        for route in routes
        for method in sorted((route.methods or set()) - {"HEAD"})
        if not route.path.endswith("/finish") and method != "DELETE"
    ]

    @settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
    @given(
        st.sampled_from(paths), bodies, st.integers(0, 40), st.sampled_from(["", "?limit=" + "9" * 5000, "?offset=-1"])
    )
    def law(path: tuple[str, str], body: dict[str, Any], torn: int, query: str) -> None:
        method, where = path
        raw = httpx.Request("POST", "http://x", json=body).content
        content = raw[: len(raw) - torn] if torn < 8 else raw
        reply = client.http.request(
            method, f"{address}{where}{query}", content=content, headers={"x-api-key": client.key, "accept": "*/*"}
        )
        assert reply.status_code < 500, (path, body, reply.text)

    law()
    assert client.get("checkpoints").status_code == 200


@pytest.mark.parametrize("seconds", [10**12, 2**65, 0, -1])
def test_a_lifetime_beyond_all_dates_is_refused_and_spoils_no_list(seconds: int, address: str, client: Client) -> None:
    model = client.create(seconds % 1_000)
    client.save(model, 1, "x")
    url = f"{address}/api/v1/training_runs/{model}/checkpoints/weights/x/ttl"
    assert client.http.put(url, json={"ttl_seconds": seconds}, headers={"x-api-key": client.key}).status_code == 400
    assert client.get("checkpoints").status_code == client.get("training_runs").status_code == 200


# Archives


def test_an_archive_is_whole_and_leaves_nothing_behind(client: Client, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    model = client.create()
    client.save(model, 1, "x")
    where = client.get(f"training_runs/{model}/checkpoints/weights/x/archive").headers["location"]
    draw = random.Random(3)
    for _ in range(4):
        headers = {"range": f"bytes={draw.randrange(10**8)}-"}
        reply = client.http.get(where, headers=headers)
        assert len(reply.content) == int(reply.headers["content-length"])
        (tmp_path / "whole.tar").write_bytes(reply.content)
        with tarfile.open(tmp_path / "whole.tar") as tar:
            assert {"adapter_model.safetensors", "adapter_config.json"} <= set(tar.getnames())
            assert all(tar.extractfile(name).read() for name in tar.getnames())  # type: ignore[union-attr]
    client.delete(f"training_runs/{model}/checkpoints/weights/x")
    assert client.http.get(where).status_code == 404
    assert [one.name for one in tmp_path.iterdir()] == ["whole.tar"]


@pytest.mark.parametrize(
    ("rows", "found"),
    [([0, 2, 3], [[7, 8, -1], [-1, -1, 9]]), ([2, 3, 3], None), ([1, 2, 3], None), ([0, 3, 2], None), ([0, 3], None)],
)
def test_sparse_targets_are_those_of_their_rows(rows: list[int], found: list[list[int]] | None) -> None:
    targets = TargetIds([7, 8, 9], shape=[2, 3], sparse_crow_indices=rows, sparse_col_indices=[0, 1, 2])
    if found is not None:
        assert dense_targets(targets, 3) == found
        return
    with pytest.raises(RefusedRequest, match="target_prompt_logprobs: indices"):
        dense_targets(targets, 3)
