"""Valid and invalid requests that schemathesis generates from the schema: no response is a server error, and all conform to the schema."""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from quiver.retrieval.serving.application import create_application
from quiver.retrieval.serving.schemas import Limits
from quiver.retrieval.serving.service import Access, Combinations, open_service
from tests.retrieval.serving.conftest import TOKEN, Indexes

schemathesis = pytest.importorskip("schemathesis")

CHECKS = [
    *("not_a_server_error", "status_code_conformance", "content_type_conformance"),
    *("response_schema_conformance", "response_headers_conformance"),
]

# Operations that are asked often enough to be answered as well as refused.
ANSWERED_AND_REFUSED = ("POST /v1/search", "POST /v1/search/batch", "POST /v1/documents")


def send_generated(operation: Any, mode: Any, cases: int, counted: Counter[tuple[str, str, int]]) -> None:
    """Send requests to an operation, and count them by operation, by whether they were valid, and by status."""
    schemathesis.checks.load_all_checks()
    wanted = schemathesis.checks.CHECKS.get_by_names(CHECKS)

    @settings(
        max_examples=cases, deadline=None, database=None, derandomize=True, phases=[Phase.generate], suppress_health_check=list(HealthCheck)
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def ask(case: Any) -> None:
        # Every other request has the token, so that changes are made and refused.
        headers = {"Authorization": f"Bearer {TOKEN}"} if sum(counted.values()) % 2 else None
        response = case.call(headers=headers, timeout=120)  # a machine may be busy
        counted[f"{operation.method.upper()} {operation.path}", mode.value, response.status_code] += 1
        case.validate_response(response, checks=wanted)

    ask()


@pytest.mark.slow
def test_a_few_generated_requests_conform_to_the_schema(indexes: Indexes, tmp_path: Path) -> None:
    shutil.copytree(indexes.dense, tmp_path / "index")
    folders = {"dense": tmp_path / "index", "colbert": indexes.colbert, "silent": indexes.silent}
    limits = Limits(k=20, batch=4, query_characters=100, documents=4)
    service = open_service(folders, combined=Combinations(words=True), access=Access(TOKEN), limits=limits)
    schema = schemathesis.openapi.from_asgi("/openapi.json", create_application(service))
    operations = [found.ok() for found in schema.get_all_operations()]
    assert len(operations) == 18
    # Pages without a body or a parameter have one valid request, which is asked a few times.
    rich = [each for each in operations if each.body or each.path_parameters]
    counted: Counter[tuple[str, str, int]] = Counter()
    for operation in operations:
        for mode in (schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE):
            if operation in rich:
                least = 12 if f"{operation.method.upper()} {operation.path}" in ANSWERED_AND_REFUSED else 1
                send_generated(operation, mode, max(least, -(-60 // (2 * len(rich)))), counted)
            elif mode is schemathesis.GenerationMode.POSITIVE:
                send_generated(operation, mode, 2, counted)
    assert sum(counted.values()) >= 60
    assert not [key for key in counted if key[2] >= 500]
    for name in ANSWERED_AND_REFUSED:
        assert {200, 422} <= {status for path, _, status in counted if path == name}
