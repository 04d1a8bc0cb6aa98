"""Bodies made from the server's own description, right and wrong: no fault of the server, no hang."""

from __future__ import annotations

import os
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

schemathesis = pytest.importorskip("schemathesis")

#: Per route; set to thousands for a long look.
CASES = int(os.environ.get("SLIPSTREAM_SCHEMA_CASES", "40"))


def operations(server: Any) -> dict[str, Any]:
    schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    found = (result.ok() for result in schema.get_all_operations())
    return {f"{one.method.upper()} {one.path}": one for one in found}


CHATS, TEXTS, MODEL = "POST /v1/chat/completions", "POST /v1/completions", "GET /v1/models/{model}"


@pytest.mark.parametrize(
    ("route", "wrong"), [(CHATS, False), (CHATS, True), (TEXTS, False), (TEXTS, True), (MODEL, False)]
)
def test_no_answer_is_a_fault(server: Any, route: str, wrong: bool) -> None:
    operation = operations(server)[route]
    mode = schemathesis.GenerationMode.NEGATIVE if wrong else schemathesis.GenerationMode.POSITIVE
    seen: set[int] = set()

    @settings(
        max_examples=CASES,
        deadline=None,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=mode), limit=st.integers(1, 8))
    def look(case: Any, limit: int) -> None:
        if isinstance(case.body, dict) and not wrong:
            case.body |= {"max_tokens": limit, "n": None}
        response = case.call(base_url=server.url, timeout=30)
        seen.add(response.status_code)
        assert response.status_code < 500, response.text
        if response.status_code >= 400 and "json" in response.headers.get("content-type", ""):
            assert set(response.json()["error"]) >= {"message", "type", "param", "code"}

    look()
    assert seen
    server.idle()
    assert server.chat().status_code == 200
