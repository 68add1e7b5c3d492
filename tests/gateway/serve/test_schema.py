"""Promises: the server describes its interface itself, and what schemathesis makes of the description is answered as
described, never with a fault.
"""

from collections.abc import Callable
from typing import Any

import httpx
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis.core.result import Ok

from tests.engine.byte_policy import NAME
from tests.gateway.serve.serving import Serving

#: Of bodies that are right, as little work as possible; the fuzzing tests have the bounds.
SMALL: dict[str, dict[str, Any]] = {
    "/v1/completions": {"max_tokens": 2, "n": 1},
    "/v1/chat/completions": {"max_tokens": 2, "n": 1},
    "/v1/responses": {"max_output_tokens": 2},
    "/v1/messages": {"max_tokens": 2},
}


def described(serving: Serving) -> Any:
    return httpx.get(f"{serving.url}/openapi.json", trust_env=False).json()


def test_the_description_knows_the_model_and_the_bounds(serving: Serving) -> None:
    description = described(serving)
    assert description["openapi"] == "3.1.0"
    completion = description["components"]["schemas"]["CompletionBody"]
    assert completion["properties"]["model"] == {"enum": [NAME]}
    assert completion["required"] == ["model", "prompt"]
    assert completion["additionalProperties"] is False
    assert {"type": "integer", "minimum": 1, "maximum": 128} in completion["properties"]["n"]["anyOf"]


def test_nothing_that_the_description_allows_makes_the_server_fail(serving: Serving) -> None:
    schema = schemathesis.openapi.from_dict(described(serving))
    operations = [found.ok() for found in schema.get_all_operations() if isinstance(found, Ok)]
    assert len(operations) == 11
    statuses: set[int] = set()

    @settings(max_examples=40, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
    @given(case=st.one_of([operation.as_strategy() for operation in operations]))
    def check(case: schemathesis.Case[Any]) -> None:
        if isinstance(case.body, dict):
            case.body = case.body | SMALL.get(case.operation.path, {})
        response = case.call(base_url=serving.url)
        statuses.add(response.status_code)
        assert response.status_code < 500, (case.body, response.text)
        case.validate_response(response, checks=[conforms_to_status, conforms_to_schema])

    conforms_to_status: Callable[..., Any] = schemathesis.checks.CHECKS.get_one("status_code_conformance")
    conforms_to_schema: Callable[..., Any] = schemathesis.checks.CHECKS.get_one("response_schema_conformance")
    check()
    assert {200, 400} <= statuses  # drawn requests are answered as well as refused
    assert httpx.get(f"{serving.url}/v1/models/none", trust_env=False).status_code == 404
