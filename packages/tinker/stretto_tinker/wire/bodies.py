"""The JSON bodies of the SDK's requests, field by field as it sends them."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

import msgspec

from stretto.core.errors import RefusedRequest
from stretto.processes.http.bodies import parse_record

Body = TypeVar("Body", bound=msgspec.Struct)
Metadata = dict[str, Any] | None
_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])
#: A number that counts: of requests, models, samplers, seconds. The largest that a result's place can be, and less.
Count = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
Far = Annotated[int, msgspec.Meta(ge=0, lt=2**62)]  # a count beyond all that one client reaches
_NOTHING = frozenset({b"null", b"false", b"0", b"0.0", b"[]", b"{}", b'""'})


#: How a client says that its session has ended.
FINISHED = frozenset({"success", "errored", "interrupted"})
#: Seconds that a checkpoint is kept.
Lifespan = Annotated[int, msgspec.Meta(ge=3_600, le=10 * 366 * 86_400)]


class OpenSession(msgspec.Struct, frozen=True):
    """``create_session``"""

    tags: list[str] = []
    user_metadata: Metadata = None
    sdk_version: str = ""
    project_id: str | None = None
    display_name: str | None = None
    type: str = ""


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
    """``sessions/search``"""

    display_name: str | None = None
    session_id: str | None = None
    project_ids: list[str] | None = None
    user_metadata: Metadata = None
    owner: _SearchOwner = _SearchOwner()
    statuses: list[_SearchStatus] | None = None
    limit: Count | None = None
    cursor: _SearchCursor | None = None

    def fits(self, id: str, name: str, metadata: Metadata, ended: str | None) -> bool:
        """Whether a session of the caller is looked for; `ended`: None while it is open."""
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


class OfSession(msgspec.Struct, frozen=True):
    """``session_heartbeat``"""

    session_id: str
    type: str = ""


class EndReason(msgspec.Struct, frozen=True):
    """Why a client ends its session."""

    type: str = "success"


class EndSession(msgspec.Struct, frozen=True):
    """``sessions/ID/finish``"""

    reason: EndReason = EndReason()
    detail: str | None = None


class Lora(msgspec.Struct, frozen=True):
    """Which adapters a model gets."""

    rank: int
    seed: int | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class OptimizerKind(msgspec.Struct, frozen=True):
    """The optimizer of a model, for its life."""

    type: str = "adamw"
    version: int = 1


class CreateModel(msgspec.Struct, frozen=True):
    """``create_model``"""

    session_id: str
    model_seq_id: Count
    base_model: str
    user_metadata: Metadata = None
    lora_config: Lora | None = None
    optimizer_config: OptimizerKind = OptimizerKind()
    type: str = ""


class OfModel(msgspec.Struct, frozen=True):
    """``get_info``"""

    model_id: str
    type: str = ""


class Adam(msgspec.Struct, frozen=True):
    """The settings of one optimizer step."""

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0


class OptimStep(msgspec.Struct, frozen=True):
    """``optim_step``"""

    model_id: str
    adam_params: dict[str, Any] | None = None  # of `Adam`; NaN arrives as null
    optimizer_params: dict[str, Any] | None = None
    seq_id: Count | None = None
    type: str = ""


class Numbered(msgspec.Struct, frozen=True):
    """The number of a request to a model, whatever else is in its body."""

    model_id: str | None = None
    seq_id: Count | None = None


class SaveWeights(msgspec.Struct, frozen=True):
    """``save_weights``, ``save_weights_for_sampler`` and ``save_weights_external``"""

    model_id: str
    path: str | None = None
    seq_id: Count | None = None
    ttl_seconds: Lifespan | None = None
    overwrite: bool = False
    user_metadata: Metadata = None
    sampling_session_seq_id: Count | None = None
    kind: str = "snapshot"
    age_encryption_recipients: list[str] | None = None
    type: str = ""


class LoadWeights(msgspec.Struct, frozen=True):
    """``load_weights``, into a model or into a new one"""

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
    type: str = ""


class OpenSampler(msgspec.Struct, frozen=True):
    """``create_sampling_session``"""

    session_id: str
    sampling_session_seq_id: Count
    base_model: str | None = None
    model_path: str | None = None
    type: str = ""


class JoinSampler(msgspec.Struct, frozen=True):
    """``join_sampling_session``"""

    sampling_session_id: str
    type: str = ""


class TextChunk(msgspec.Struct, frozen=True):
    """A part of a prompt; chunks of other types hold no tokens."""

    type: str = "encoded_text"
    tokens: tuple[int, ...] = ()


class PromptTokens(msgspec.Struct, frozen=True):
    """A prompt."""

    chunks: tuple[TextChunk, ...]

    def token_ids(self) -> tuple[int, ...]:
        """All of them.

        Raises:
            RefusedRequest: a chunk is of another kind.
        """
        for at, chunk in enumerate(self.chunks):
            if chunk.type != "encoded_text":
                allowed = "encoded_text: the models served here read text alone"
                raise RefusedRequest(f"prompt.chunks[{at}]", f"a chunk of the kind {chunk.type!r:.40}", allowed)
        return tuple(token for chunk in self.chunks for token in chunk.tokens)


class SamplingParams(msgspec.Struct, frozen=True):
    """How a completion is sampled."""

    max_tokens: int | None = None
    seed: int | None = None
    stop: str | list[str | int] | None = None
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0


class TargetIds(msgspec.Struct, frozen=True):
    """Tokens whose log-probabilities are wanted: an array, dense or compressed by rows."""

    data: list[int]
    dtype: str = "int64"
    shape: list[int] | None = None
    sparse_crow_indices: list[int] | None = None
    sparse_col_indices: list[int] | None = None


class Sample(msgspec.Struct, frozen=True):
    """``asample``"""

    prompt: PromptTokens
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
    type: str = ""


class OfRequest(msgspec.Struct, frozen=True):
    """``retrieve_future`` and ``cancel_future``"""

    request_id: str
    allow_metadata_only: bool = False


class OfSampler(msgspec.Struct, frozen=True):
    """The requests of a sampling session that one client of it sent."""

    sampling_session_id: str
    cloned_sampler_id: Count = 0
    type: str = ""


class RetrieveFutures(msgspec.Struct, frozen=True):
    """``retrieve_futures``"""

    target: OfSampler
    prev_cursor: Far = 0
    timeout: float | None = None
    retrieved_request_ids: list[str] = []


class CopyWeights(msgspec.Struct, frozen=True):
    """``copy_weights``"""

    source_path: str
    session_id: str | None = None
    model_seq_id: int | None = None
    destination_project_id: str | None = None
    ttl_seconds: int | None = None
    weights_access_token: str | None = None


class Lifetime(msgspec.Struct, frozen=True):
    """``checkpoints/ID/ttl``"""

    ttl_seconds: Lifespan | None = None


class OfPath(msgspec.Struct, frozen=True):
    """``weights_info``"""

    tinker_path: str


def parse(raw: bytes, kind: type[Body]) -> Body:
    """The request in a body.

    A later version of the SDK may send a field that is unknown here: where it holds nothing (null, false, 0, or an
    empty list), it is passed over; otherwise the request is refused with the field's name.

    Raises:
        RefusedRequest: a field is wrong, missing or unknown.
    """
    body = parse_record(raw, kind)
    known = {field.encode_name for field in msgspec.structs.fields(kind)}
    for name, value in _FIELDS.decode(raw).items():
        if name not in known and bytes(value) not in _NOTHING:
            raise RefusedRequest(name, "a field that is not served", f"{', '.join(sorted(known))}")
    return body
