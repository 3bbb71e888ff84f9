"""The document about the admin port: it is one, it says what is served, and what is served keeps to it.

schemathesis asks a running sidecar everything that the document allows and much that it does not. Left out are the
stream of events, which never ends, and the demand that every valid request is taken: whether a cursor or a name is one
that exists, no schema can say.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import openapi_spec_validator
import pytest

from sidecar.admin.fields import NoBody
from tests.conftest import Running, Starter, UpstreamStarter
from tests.doubles.letters import keep
from tests.doubles.upstream import always, answer
from tests.test_admin import admin
from tests.test_admin_access import OPERATOR, bearer, token_file  # noqa: F401  # a fixture

ONE_ATTEMPT = True
SEED, EXAMPLES = 7, 8
ENDLESS = "/events"


@pytest.fixture
async def busy(start_sidecar: Starter, start_upstream: UpstreamStarter, route: Any) -> Running:
    """A sidecar with something to show."""
    upstream = await start_upstream(always(answer(b"no", "500 No")))
    closed = {"mode": "configured_only"}  # jobs are handed in that would be sent anywhere
    sidecar = await start_sidecar(upstreams=route(upstream), egress=closed)
    for _ in range(3):
        await (await sidecar.app()).ask("GET /u/x HTTP/1.1\r\nHost: s\r\n\r\n")
    for number in range(3):
        await keep(sidecar, upstream, number)
    return sidecar


async def document_of(sidecar: Running) -> dict[str, Any]:
    reply = await admin(sidecar, "/openapi.json")
    assert (200, "application/json") == (reply.status, (reply.get("content-type") or "").split(";")[0])
    document: dict[str, Any] = reply.json
    return document


async def test_the_document_is_valid_openapi(busy: Running) -> None:
    openapi_spec_validator.validate(await document_of(busy))


async def test_every_row_is_in_it_with_its_statuses(busy: Running) -> None:
    paths = (await document_of(busy))["paths"]
    served = {(row.method.lower(), row.path) for row in busy.api.routes}
    assert served == {(method, path) for path, methods in paths.items() for method in methods}
    ids = [operation["operationId"] for methods in paths.values() for operation in methods.values()]
    assert len(ids) == len(set(ids))
    for row in busy.api.routes:
        operation = paths[row.path][row.method.lower()]
        told = {int(status) for status in operation["responses"]}
        assert {200, 400, 401, 403, 429, 500, *row.refusals, *row.otherwise} <= told
        assert (row.body is not NoBody) == ("requestBody" in operation)
        assert ({413, 415} <= told) == (row.body is not NoBody)
        names = [parameter["name"] for parameter in operation["parameters"]]
        assert [*row.parts, *row.query.model_fields, *row.fields] == names
        assert ("read" if row.method == "GET" else "operate") == operation["x-sidecar-role"]


async def test_it_says_whether_a_token_is_needed(busy: Running, start_sidecar: Starter, token_file: Path) -> None:  # noqa: F811
    assert [] == (await document_of(busy))["security"]
    guarded = await start_sidecar(admin={"port": 0, "token_file": str(token_file)})
    told = (await admin(guarded, "/openapi.json", bearer(OPERATOR))).json
    assert [{"token": []}] == told["security"]
    openapi_spec_validator.validate(told)


def with_things_that_exist(document: dict[str, Any], known: dict[str, list[str]]) -> dict[str, Any]:
    """Names of things that are there, so that not every question ends in a 404."""
    for path, methods in document["paths"].items():
        for operation in methods.values():
            for parameter in operation["parameters"]:
                words = known.get(f"{path}#{parameter['name']}")
                if words:
                    parameter["schema"] = {"anyOf": [{"enum": words}, parameter["schema"]]}
    return document


async def things(sidecar: Running) -> dict[str, list[str]]:
    letters = [item["dlq_id"] for item in (await admin(sidecar, "/dlq")).json["items"]]
    sessions = [session.session_id.decode() for session in sidecar.proxy.signals.sessions.page().items]
    return {
        "/breakers/{upstream}/{action}#upstream": ["u"],
        "/policies/{id}#id": ["default", "careful"],
        "/sessions/{id}#id": sessions,
        "/errors/{code}#code": ["CIRCUIT_OPEN"],
        "/dlq/{id}#id": letters,
        "/dlq/{id}/replay#id": letters,
    }


@pytest.mark.timeout(180)  # a minute is plenty, but not on every machine
async def test_whatever_is_asked_is_answered_as_the_document_says(busy: Running, tmp_path: Path) -> None:
    document = with_things_that_exist(await document_of(busy), await things(busy))
    file = tmp_path / "openapi.json"
    file.write_text(json.dumps(document))
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "schemathesis.cli", "run", str(file)),
        *("--url", f"http://127.0.0.1:{busy.admin_address[1]}", "--exclude-path", ENDLESS),
        *("--phases", "examples,coverage,fuzzing", "--exclude-checks", "positive_data_acceptance"),
        *("--seed", str(SEED), "--max-examples", str(EXAMPLES), "--no-color", "--request-timeout", "60"),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        cwd=tmp_path,
    )
    out, _ = await process.communicate()
    assert 0 == process.returncode, out.decode()[-8000:]
    assert f"Selected: {len(busy.api.routes) - 1}/{len(busy.api.routes)}" in out.decode()
    assert 0 == busy.proxy.metrics.internal_errors["admin"]
