"""A small real server with vLLM's interface: what it is asked before a start, and completions that a test writes."""

import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from stretto.model.hf.tokenizer import load_tokenizer

Asked = list[tuple[str, Any]]


@contextmanager
def serving(replies: dict[str, Any], asked: Asked | None = None) -> Iterator[str]:
    """Its address. A reply is JSON, or the text of a function of what was asked; `asked` gets path and body of each
    POST."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._reply(replies.get(self.path))

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            said = json.loads(body) if body else {}
            if asked is not None:
                asked.append((self.path, said))
            known = said.get("model", "m") == "m"  # the name that it gives its model
            reply = replies.get(self.path)
            self._reply((reply(said) if callable(reply) else reply) if known else None)

        def _reply(self, message: object) -> None:
            body = message.encode() if isinstance(message, str) else json.dumps(message).encode()
            self.send_response(404 if message is None else 200)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *arguments: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def replies_of(policy: Path, context: int = 32) -> dict[str, Any]:
    """What it says of itself, and the tokens of a text."""
    tokenizer = load_tokenizer(policy)
    return {
        "/version": {"version": "0.32.0"},
        "/v1/models": {"data": [{"id": "m", "root": str(policy), "max_model_len": context}]},
        "/is_paused": {"is_paused": False},
        "/weight_info": {"weight_version": "default"},
        "/tokenize": lambda asked: {"tokens": list(tokenizer.encode(asked["prompt"]))},
    }


def replies_that_say(tokens: Sequence[int], logprobs: Sequence[float]) -> dict[str, Any]:
    """Every completion is these tokens; and it loads what it is given. Asked for one token of them all, as a run asks
    before it trusts the log-probabilities, it reports those of what it samples."""
    content = [{"token_id": token, "logprob": logprob} for token, logprob in zip(tokens, logprobs, strict=True)]
    loaded = ["default"]  # names of versions, the newest last
    honest = replies_with_logprobs(raw=False)["/inference/v1/generate"]

    def load(asked: Mapping[str, Any]) -> dict[str, bool]:
        loaded.append(asked["new_version"])
        return {"success": True}

    def generate(asked: Mapping[str, Any]) -> str:
        if "prompt_logprobs" in (sampling := asked["sampling_params"]) or sampling.get("top_k") == 1:
            return str(honest(asked))
        choice = {
            "token_ids": list(tokens),
            "finish_reason": "stop",
            "logprobs": {"content": content},
            "weight_versions": [{"version": loaded[-1], "start": 0, "end": len(tokens)}],
        }
        return f"data: {json.dumps({'choices': [choice]})}\n\ndata: [DONE]\n\n"

    paths = ("/health", "/pause?mode=abort&clear_cache=true", "/collective_rpc", "/resume")
    own = {"/update_weight_version": load, "/inference/v1/generate": generate}
    return {path: {"success": True} for path in paths} | own


def replies_with_logprobs(*, raw: bool) -> dict[str, Any]:
    """Every token is sampled with probability 1 if it is asked for by itself, and scored with 1/2. `raw`: as vLLM's
    default mode reports it."""

    def generate(asked: Mapping[str, Any]) -> str:
        sampling, given = asked["sampling_params"], asked["token_ids"]
        if "prompt_logprobs" in sampling:
            return json.dumps({"prompt_logprobs": [None, *({str(token): {"logprob": -0.7}} for token in given[1:])]})
        tokens = [{"token_id": 2, "logprob": -0.7 if raw else 0.0}] * sampling["max_tokens"]
        ids = [token["token_id"] for token in tokens]
        choice = {"token_ids": ids, "finish_reason": "length", "logprobs": {"content": tokens}}
        return f"data: {json.dumps({'choices': [choice]})}\n\ndata: [DONE]\n\n"

    return {"/inference/v1/generate": generate}
