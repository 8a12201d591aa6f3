"""Schemathesis against a live server and its own OpenAPI document: no 5xx, no undocumented answer."""

from __future__ import annotations

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
    unsupported_method,
)

from tests.serve.live import serving

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
    negative_data_rejection,
    unsupported_method,
]


@pytest.fixture(scope="module")
def live():
    with serving(resident=4, max_tokens=4, max_sessions=50) as live:
        yield live


@pytest.fixture
def api(live):
    return schemathesis.openapi.from_url(f"{live.url}/openapi.json")


def try_all(api, examples):
    for operation in api.get_all_operations():
        if operation.ok().path in ("/metrics", "/v1/events"):
            continue
        run(operation.ok(), examples)


def run(operation, examples):
    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        derandomize=True,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    def check(case):
        if isinstance(case.body, dict):
            case.body["stream"] = (
                case.body.get("stream") if isinstance(case.body.get("stream"), str) else False
            )
        case.call_and_validate(checks=CHECKS, timeout=20)

    given(case=operation.as_strategy())(check)()


def test_fuzz(api):
    try_all(api, 15)


@pytest.mark.slow
def test_fuzz_long(api):
    try_all(api, 300)
