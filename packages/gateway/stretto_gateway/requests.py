"""Decoded requests of every dialect, their errors, and the conversion of sampling options to the engine's
`Sampling`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from stretto.core.engine import json_rule
from stretto.core.errors import RefusedRequest
from stretto.core.records import Record, Sampling
from stretto_workflows.chat.messages import ChatRequest, SamplingOptions
from stretto_workflows.chat.tool_calls import CallForm

_HEADERS = {
    401: [(b"www-authenticate", b"Bearer")],
    409: [(b"x-should-retry", b"false")],  # some clients retry a 409 by default
    429: [(b"retry-after", b"1")],
    503: [(b"retry-after", b"1")],
}


class PromptRequest(Record, frozen=True):
    """One HTTP request for completions of plain prompts (texts or token ids).

    Attributes:
        model: name of the requested model; None for the served one.
        dialect_fields: data that the dialect needs to encode the reply.
        n: completions per prompt; UNSET: one.
        usual_tokens: limit of a completion if the client gives none; None: the rest of the context.
        stop_token_ids: tokens that end a completion, beside the end of sequence.
        ignore_eos: whether a completion goes on after an end of sequence.
    """

    model: str | None
    prompts: tuple[str | tuple[int, ...], ...]
    options: SamplingOptions
    stream: bool = False
    dialect_fields: Mapping[str, Any] = {}
    n: int | UnsetType = UNSET
    usual_tokens: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False


Request = ChatRequest | PromptRequest


class NotServed(Exception):
    """Raised to send an error reply to the client.

    Attributes:
        status: HTTP status, 400 or more.
        field: path of the wrong field in the body; "" for none.
        code: error code for clients, such as "context_length_exceeded" or "session_ended"; "" for none.
        headers: headers of the reply, such as Retry-After.
    """

    def __init__(self, status: int, message: str, field: str = "", code: str = "", allow: str = "") -> None:
        """Create an error reply; for `field` and `code` see the attributes. `allow`: the header Allow; "" for none."""
        super().__init__(message)
        self.status, self.message, self.field, self.code = status, message, field, code
        self.headers = _HEADERS.get(status, []) + ([(b"allow", allow.encode())] if allow else [])


#: Options that change the sampling distribution.
DISTRIBUTION = ("temperature", "top_p", "top_k", "min_p")


def shared_options(body: object) -> dict[str, Any]:
    """Sampling options whose names are the same in every dialect (`DISTRIBUTION` and the seed), as arguments for
    `SamplingOptions`. `body`: decoded body of a request; None stands for a field that it lacks or that is not set."""
    return {field: getattr(body, field, None) for field in (*DISTRIBUTION, "seed")}


@dataclass(frozen=True)
class CallForms:
    """Makes grammars for the turns of one model. `form`: the model's syntax of tool calls. `vocabulary`: its token ids
    by text."""

    form: CallForm
    vocabulary: Mapping[str, int]

    def grammar(self, request: ChatRequest) -> str:
        """Grammar for a turn, in llguidance's syntax. If `tool_choice` demands a call: calls alone. Else, if the text
        must be JSON: such a text, or calls of the offered tools (none with "none"). Else "": any text.

        Raises:
            RefusedRequest: a schema cannot be expressed as a grammar.
        """
        options = request.options
        named = [tool for tool in request.tools if options.tool_choice in (tool.name, "required", "auto")]
        parallel = options.parallel_calls and options.tool_choice in ("required", "auto")
        text = f"text: {json_rule(options.schema)}\n" if options.json else ""
        if _forced(options):
            return f"start: calls\n{self.form.rules(named, self._word, parallel=parallel)}"
        if not text or not named:
            return text and f"start: text\n{text}"
        return f"start: text | calls\n{text}{self.form.rules(named, self._word, parallel=parallel)}"

    def _word(self, text: str) -> str:
        """Grammar for a fixed text: its token id if the text is a single token, else the quoted text."""
        return f"<[{self.vocabulary[text]}]>" if text in self.vocabulary else json.dumps(text)


def _forced(options: SamplingOptions) -> bool:
    return options.tool_choice not in ("auto", "none")


@dataclass(frozen=True)
class SamplingRule:
    """Defaults and limits of a server for its clients' sampling options.

    Attributes:
        default: options where a client gives none; its `max_tokens` bounds every completion.
        context: most tokens of a prompt and its completion together.
        chosen: distribution options that clients may set; others are ignored. None in a run, whose policy is trained
            on one distribution.
        forms: makes grammars; None if the engine does not support them.
        seeds: whether clients may set a seed.
        vocabulary: size of the model's vocabulary; a `top_k` of at least this filters nothing.
    """

    default: Sampling
    context: int
    chosen: tuple[str, ...] = DISTRIBUTION
    forms: CallForms | None = None
    seeds: bool = False
    vocabulary: int = 2**31

    def check(self, request: ChatRequest) -> None:
        """Check the request's tools.

        Raises:
            RefusedRequest: `tool_choice` names a tool that the request does not offer, or is "required" without tools.
        """
        choice, offered = request.options.tool_choice, [tool.name for tool in request.tools]
        if _forced(request.options) and (choice not in offered if choice != "required" else not offered):
            allowed = f"one of the tools that the request offers: {', '.join(offered)[:400] or 'none'}"
            raise RefusedRequest("tool_choice", repr(choice[:80]), allowed)

    def unapplied(self, request: ChatRequest) -> tuple[str, ...]:
        """Names (of Chat Completions) of the request's options that this server ignores. An option that asks for the
        server's default does not count."""
        options, followed = request.options, self.forms is not None
        forced = followed and bool(request.tools) and _forced(options)
        ignored = {
            "tool_choice": _forced(options) and not followed,
            "parallel_tool_calls": bool(request.tools) and not options.parallel_calls and not forced,
            "strict": any(tool.strict for tool in request.tools) and not forced,
            "response_format": options.json and not followed,
            "seed": options.seed is not None and not self.seeds,
        }
        for name in DISTRIBUTION:
            wish = self._top_k(options.top_k) if name == "top_k" else getattr(options, name)
            ignored[name] = wish not in (None, getattr(self.default, name)) and name not in self.chosen
        return tuple(name for name, unapplied in ignored.items() if unapplied)

    def _top_k(self, wish: int | None) -> int | None:
        """The engine's `top_k` for a client's: the same, but 0 (no filter) for negative values and values of at least
        the vocabulary's size, and None for None."""
        return wish if wish is None or 0 < wish < self.vocabulary else 0

    def sampling(self, request: Request, prompt_tokens: int, *, strict: bool = False) -> Sampling:
        """Make the engine's sampling options for a request whose prompt has `prompt_tokens` tokens. Options that
        clients may not set keep their defaults; stop texts are added to the default ones.

        Args:
            strict: refuse a token limit beyond the context; otherwise it is reduced.

        Raises:
            RefusedRequest: the context has no room after the prompt, a schema cannot be expressed as a grammar, or
                (with `strict`) the token limit is beyond the context.
        """
        options, default, left = request.options, self.default, self.context - prompt_tokens
        if left < 1:
            allowed = f"at most {self.context - 1:,}, so that the context has room for a completion"
            raise RefusedRequest("prompt_token_ids", f"{prompt_tokens:,} tokens", allowed)
        most = options.max_tokens or left
        if strict and most > left:
            allowed = f"at most {left:,}: the rest of the context of {self.context:,} tokens after the prompt"
            raise RefusedRequest("sampling.max_tokens", f"{most}"[:40], allowed)
        changes = {field: value for field in self.chosen if (value := getattr(options, field)) is not None}
        if "top_k" in changes:
            changes["top_k"] = self._top_k(options.top_k)
        if isinstance(request, PromptRequest):
            most = min(most, request.usual_tokens or most) if options.max_tokens is None else most
            ends = () if request.ignore_eos else default.stop_token_ids
            changes["stop_token_ids"] = tuple(dict.fromkeys(ends + request.stop_token_ids))
        elif self.forms is not None:
            changes["grammar"] = self.forms.grammar(request)
        changes["max_tokens"] = min(most, left, default.max_tokens)
        return msgspec.structs.replace(default, stop=default.stop + options.stop, **changes)
