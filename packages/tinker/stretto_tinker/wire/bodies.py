"""Record types of the SDK's JSON bodies; each docstring names the endpoint."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

import msgspec

from stretto.core.errors import RefusedRequest
from stretto.processes.http.asgi import parse_record

Body = TypeVar("Body", bound=msgspec.Struct)
Metadata = dict[str, Any] | None
_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])
#: Number of a request, model or sampler, or a limit.
Count = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
Far = Annotated[int, msgspec.Meta(ge=0, lt=2**62)]  # number of a request of a sampler, or a cursor
_NOTHING = frozenset({b"null", b"false", b"0", b"0.0", b"[]", b"{}", b'""'})
#: States that a client may report for the end of its session.
FINISHED = frozenset({"success", "errored", "interrupted"})
#: Lifetime of a checkpoint in seconds: an hour to ten years.
Lifespan = Annotated[int, msgspec.Meta(ge=3_600, le=10 * 366 * 86_400)]


class _Typed(msgspec.Struct, frozen=True, kw_only=True):
    """A body that may name its `type`, which is ignored."""

    type: str = ""


class OpenSession(_Typed, frozen=True):
    """Body of ``create_session``. `display_name`: what the client calls it. `project_id`: refused if it is not None."""

    tags: list[str] = []
    user_metadata: Metadata = None
    sdk_version: str = ""
    project_id: str | None = None
    display_name: str | None = None


class _SearchOwner(msgspec.Struct, frozen=True):
    type: Literal["own", "accessible", "user"] = "own"
    owner_urns: list[str] = []


class _SearchStatus(msgspec.Struct, frozen=True):
    type: Literal["active", "cancelled", "failed", "client_finished"]
    reasons: list[str] | None = None


class _SearchCursor(msgspec.Struct, frozen=True):
    last_session_id: str
    last_created_at: str = ""


class SearchSessions(msgspec.Struct, frozen=True):
    """Body of ``sessions/search``. A criterion that is None, or left out, matches every session. `project_ids` are
    refused. `limit`: most sessions in the reply; None: 50"""

    display_name: str | None = None
    session_id: str | None = None
    project_ids: list[str] | None = None
    user_metadata: Metadata = None
    owner: _SearchOwner = _SearchOwner()
    statuses: list[_SearchStatus] | None = None
    limit: Count | None = None
    cursor: _SearchCursor | None = None

    def fits(self, id: str, name: str, metadata: Metadata, ended: str | None) -> bool:
        """Whether a session matches the search: its id is the one searched for or its name has all searched words, it
        has the searched metadata, and it is in one of the searched states. What the search leaves out is not compared.
        `name`: what the client calls the session; "": nothing. `ended`: how it ended; None while it is open."""
        named = self.display_name is not None and all(
            word in name.lower() for word in self.display_name.lower().split()
        )
        anyone = self.display_name is None and self.session_id is None
        states = self.statuses
        return (
            (anyone or named or id == self.session_id)
            and (metadata or {}).items() >= (self.user_metadata or {}).items()
            and (states is None or any(_is_in_state(ended, state) for state in states))
        )


def _is_in_state(ended: str | None, state: _SearchStatus) -> bool:
    if state.type == "client_finished":
        return ended in (FINISHED if state.reasons is None else set(state.reasons) & FINISHED)
    return state.type == "active" and ended is None


class OfSession(_Typed, frozen=True):
    """Body of ``session_heartbeat``: the client is alive"""

    session_id: str


class _EndReason(msgspec.Struct, frozen=True):
    """Reason why a client ends its session; `type` is one of `FINISHED`, or is refused."""

    type: str = "success"


class EndSession(msgspec.Struct, frozen=True):
    """Body of ``sessions/ID/finish``: the client ends its session. `detail` is ignored"""

    reason: _EndReason = _EndReason()
    detail: str | None = None


class Lora(msgspec.Struct, frozen=True):
    """LoRA settings of a model: rank, seed of the initial values (None: the server draws one), and which layers get
    adapters: the output layer (`train_unembed`), MLP and attention."""

    rank: int
    seed: int | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class OptimizerKind(msgspec.Struct, frozen=True):
    """Optimizer of a model. Any `type` is decoded; the handlers refuse all but "adamw"."""

    type: str = "adamw"
    version: int = 1


class CreateModel(_Typed, frozen=True):
    """Body of ``create_model``. `model_seq_id`: number of the model in its session. `lora_config`: None: all weights
    are trained"""

    session_id: str
    model_seq_id: Count
    base_model: str
    user_metadata: Metadata = None
    lora_config: Lora | None = None
    optimizer_config: OptimizerKind = OptimizerKind()


class OfModel(_Typed, frozen=True):
    """Body of ``get_info``"""

    model_id: str


class Adam(msgspec.Struct, frozen=True):
    """Settings of AdamW for one step. `grad_clip_norm`: largest norm of the gradient; 0 for no limit."""

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0


class OptimStep(_Typed, frozen=True):
    """Body of ``optim_step``. The settings of AdamW are `adam_params` or `optimizer_params`, just one of them.
    `seq_id`: number of the request for its model; None is refused"""

    model_id: str
    adam_params: dict[str, Any] | None = None  # of `Adam`; NaN arrives as null
    optimizer_params: dict[str, Any] | None = None
    seq_id: Count | None = None


class Numbered(msgspec.Struct, frozen=True):
    """Model and number of a training request (None: it names none); its other fields are ignored."""

    model_id: str | None = None
    seq_id: Count | None = None


class SaveWeights(_Typed, frozen=True):
    """Body of ``save_weights``, ``save_weights_for_sampler`` and ``save_weights_external``

    `path`: name of the checkpoint. None, for a sampler only: the weights get no name, and a sampling session with the
    number `sampling_session_seq_id` is opened on them; the `kind` "inflight" lets this follow later such saves.
    `ttl_seconds`: lifetime; None: unlimited. `overwrite`: replace a checkpoint with this name. Encryption
    (`age_encryption_recipients`) is refused.
    """

    model_id: str
    path: str | None = None
    seq_id: Count | None = None
    ttl_seconds: Lifespan | None = None
    overwrite: bool = False
    user_metadata: Metadata = None
    sampling_session_seq_id: Count | None = None
    kind: str = "snapshot"
    age_encryption_recipients: list[str] | None = None


class LoadWeights(_Typed, frozen=True):
    """Body of ``load_weights``, into an existing model (`model_id`) or a new one (`session_id` and `model_seq_id`)

    `path`: of the checkpoint, ``tinker://...``. `optimizer`: load the optimizer state too; otherwise it is reset.
    `base_model` and `optimizer_config` may be None; else they must name the served model, and "adamw".
    `weights_access_token` is refused.
    """

    path: str
    optimizer: bool
    model_id: str | None = None
    seq_id: Count | None = None
    session_id: str | None = None
    model_seq_id: Count | None = None
    base_model: str | None = None
    user_metadata: Metadata = None
    optimizer_config: OptimizerKind | None = None
    weights_access_token: str | None = None


class OpenSampler(_Typed, frozen=True):
    """Body of ``create_sampling_session``. `sampling_session_seq_id`: number of the sampling session in the session.
    `model_path`: weights, ``tinker://...``; None: the base model, which `base_model` must then name. None for both is
    refused"""

    session_id: str
    sampling_session_seq_id: Count
    base_model: str | None = None
    model_path: str | None = None


class JoinSampler(_Typed, frozen=True):
    """Body of ``join_sampling_session``: a further client uses a sampling session, with request numbers of its own"""

    sampling_session_id: str


class _TextChunk(msgspec.Struct, frozen=True):
    """A part of a prompt. Any `type` is decoded; `_PromptTokens.token_ids` refuses all but "encoded_text"."""

    type: str = "encoded_text"
    tokens: tuple[int, ...] = ()


class _PromptTokens(msgspec.Struct, frozen=True):
    """A prompt as a list of chunks."""

    chunks: tuple[_TextChunk, ...]

    def token_ids(self) -> tuple[int, ...]:
        """Token ids of all chunks, joined.

        Raises:
            RefusedRequest: a chunk is not text.
        """
        for at, chunk in enumerate(self.chunks):
            if chunk.type != "encoded_text":
                allowed = "encoded_text: the models served here read text alone"
                raise RefusedRequest(f"prompt.chunks[{at}]", f"a chunk of the kind {chunk.type!r:.40}", allowed)
        return tuple(token for chunk in self.chunks for token in chunk.tokens)


class SamplingParams(msgspec.Struct, frozen=True):
    """Sampling settings of a request. `max_tokens`: None: up to the context. `seed`: None: the server draws one.
    `stop`: texts or token ids; [] turns off the tokenizer's end of sequence too. `top_k`: -1 and 0: all tokens."""

    max_tokens: int | None = None
    seed: int | None = None
    stop: str | list[str | int] | None = None
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0


class TargetIds(msgspec.Struct, frozen=True):
    """Tokens whose log-probabilities are requested at each position of a prompt after the first, [P - 1, K]: a dense
    array, flat in `data`, or a sparse one in CSR format, with the fields `sparse_...` (None: dense)."""

    data: list[int]
    dtype: str = "int64"
    shape: list[int] | None = None
    sparse_crow_indices: list[int] | None = None
    sparse_col_indices: list[int] | None = None


class Sample(_Typed, frozen=True):
    """Body of ``asample``. `seq_id`: number of the request in its sampling session, `sampling_session_id`; None for
    either is refused. The weights are those of the session. The fields from `prompt_logprobs` on ask for
    log-probabilities and likeliest tokens, of the prompt or of the samples (`topk_sample_logprobs`);
    `record_stability_info` is refused"""

    prompt: _PromptTokens
    sampling_params: SamplingParams
    num_samples: int = 1
    base_model: str | None = None
    model_path: str | None = None
    sampling_session_id: str | None = None
    seq_id: Far | None = None
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: int = 0
    topk_sample_logprobs: int = 0
    target_prompt_logprobs: TargetIds | None = None
    prompt_alt_tokens_k: int = 0
    prompt_logprobs_last_n: int | None = None
    record_stability_info: bool | None = None


class OfRequest(msgspec.Struct, frozen=True):
    """Body of ``retrieve_future`` and ``cancel_future``. `allow_metadata_only`: the reply may give the size of a result
    above 4 MiB in its place"""

    request_id: str
    allow_metadata_only: bool = False


class _OfSampler(_Typed, frozen=True):
    """Selects the requests of one client of a sampling session. `cloned_sampler_id`: number of the client: 0 for the
    one that opened it, else that of the reply to ``join_sampling_session``."""

    sampling_session_id: str
    cloned_sampler_id: Count = 0


class RetrieveFutures(msgspec.Struct, frozen=True):
    """Body of ``retrieve_futures``: requests that were settled after `prev_cursor`. `timeout`: seconds to wait for one;
    None: 25. `retrieved_request_ids`: results that the client has, and that may be dropped"""

    target: _OfSampler
    prev_cursor: Far = 0
    timeout: float | None = None
    retrieved_request_ids: list[str] = []


class Lifetime(msgspec.Struct, frozen=True):
    """Body of ``checkpoints/ID/ttl``. `ttl_seconds`: from now on; None: unlimited"""

    ttl_seconds: Lifespan | None = None


class OfPath(msgspec.Struct, frozen=True):
    """Body of ``weights_info``"""

    tinker_path: str


def parse(raw: bytes, kind: type[Body]) -> Body:
    """Decode a JSON body as a record of the type `kind`.

    A later version of the SDK may send unknown fields. They are ignored if they are empty (null, false, 0, "", [] or
    {}); otherwise the request is refused.

    Raises:
        RefusedRequest: names the first field that is wrong, missing or unknown.
    """
    body = parse_record(raw, kind)
    known = {field.encode_name for field in msgspec.structs.fields(kind)}
    for name, value in _FIELDS.decode(raw).items():
        if name not in known and bytes(value) not in _NOTHING:
            raise RefusedRequest(name, "a field that is not served", f"{', '.join(sorted(known))}")
    return body
