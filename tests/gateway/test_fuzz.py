"""Whatever is sent to a described operation, the answer is a described one and never a 5xx."""

from __future__ import annotations

import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
)

from tokenpath.config.spec import Limits
from tokenpath.gateway.openai.openapi import openapi_document

schema = schemathesis.openapi.from_dict(openapi_document(Limits(), ["toy"]))


@schema.parametrize()
@settings(max_examples=15, suppress_health_check=list(HealthCheck), deadline=None)
def test_operations(case, server):
    case.call_and_validate(
        base_url=server.url,
        checks=[
            not_a_server_error,
            content_type_conformance,
            negative_data_rejection,
            response_schema_conformance,
            status_code_conformance,
        ],
    )
