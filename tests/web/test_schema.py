"""Schemathesis reads the OpenAPI description and asks whatever it allows, and what it does not."""

from __future__ import annotations

from typing import Any

import hypothesis
import pytest
import schemathesis
from hypothesis import HealthCheck
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi import checks
from serving import image, small_model

from vitkit.web.app import create_app
from vitkit.web.settings import ServeSettings

CHECKS = [
    not_a_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_schema_conformance,
]
QUIET = [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large]


def schema() -> Any:
    settings = ServeSettings(host="0.0.0.0")  # answers to any name, also to "testserver"
    return schemathesis.openapi.from_asgi("/openapi.json", create_app([small_model()], settings))


def ask_all(examples: int) -> int:
    """Every operation, `examples` times: no server error, and answers as described. How often something was asked."""
    asked = 0
    for result in schema().get_all_operations():
        operation = result.ok()

        @hypothesis.given(case=operation.as_strategy())
        @hypothesis.settings(max_examples=examples, deadline=None, suppress_health_check=QUIET, database=None)
        def check(case: Any) -> None:
            nonlocal asked
            asked += 1
            if case.body is not None and case.method == "POST" and asked % 2:  # half of them with a real image
                case.body, case.media_type = image(), "image/png"
            answer = case.call()
            assert answer.status_code < 500, f"{case.method} {case.formatted_path} {case.query}: {answer.text}"
            case.validate_response(answer, checks=CHECKS)

        check()
    return asked


def test_the_description_holds() -> None:
    assert ask_all(3) >= 15


@pytest.mark.slow
def test_the_description_holds_for_many() -> None:
    assert ask_all(250) > 500
