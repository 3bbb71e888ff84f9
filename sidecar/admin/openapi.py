"""`GET /openapi.json`: what the admin port takes and answers, for programs.

Law: made from the same rows that are served and the same models that validate, so it cannot say anything else. Made
when it is first asked for, in a thread: most sidecars are never asked.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator, Mapping, Sequence
from http import HTTPStatus
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import JsonSchemaMode, models_json_schema

from sidecar import __version__
from sidecar.admin.fields import Answer, NoBody, NoQuery
from sidecar.admin.negotiation import HTML, JSON
from sidecar.admin.problem import ErrorAnswer
from sidecar.admin.route import Call, Route, Told
from sidecar.proxy import Proxy

_REF = "#/components/schemas/{model}"
_TOKEN = "token"
_LOOKING = "GET"
_ALWAYS = (400, 401, 403, 429, 500)
_WITH_A_BODY = (408, 413, 415)
_MEANING = {
    400: "Something that was sent is wrong; `details.errors` names each field, and what to write instead.",
    401: "A token is needed (`admin.token_file`), and none that is known was sent.",
    403: "The token may only look; or Host or Origin is not the admin port's own.",
    404: "What the path names is not there.",
    408: "The body did not arrive in time.",
    409: "It cannot be done in the present state.",
    413: "The body is too large.",
    415: "The body is not JSON.",
    429: "Too many wrong tokens came from this address; `Retry-After` says how long to wait.",
    500: "A fault of the sidecar; its log says more.",
    503: "Not now; `Retry-After`, if there is one, says when.",
}
_HEADERS: dict[int, dict[str, Any]] = {
    401: {"WWW-Authenticate": {"description": "`Bearer`.", "schema": {"type": "string"}}},
    429: {"Retry-After": {"description": "Seconds to wait.", "schema": {"type": "string", "pattern": "^[0-9]+$"}}},
}


class Document(Answer):
    """An OpenAPI 3.1 document."""

    openapi: str
    info: Mapping[str, Any]
    paths: Mapping[str, Any]
    components: Mapping[str, Any]
    security: Sequence[Mapping[str, Any]]


class OpenApi:
    """The handler. `described` is the table it is in itself, complete before the first request comes."""

    def __init__(self, proxy: Proxy) -> None:
        self._proxy = proxy
        self.described: Sequence[Route] = ()
        self._document: dict[str, Any] = {}

    def routes(self) -> Iterator[Route]:
        yield Route("GET", "/openapi.json", "This document.", self.document, Document)

    async def document(self, call: Call[NoQuery, NoBody]) -> Told:
        if not self._document:
            self._document = await asyncio.to_thread(document, self.described)
        with_tokens = self._proxy.settings.admin.token_file is not None
        return {**self._document, "security": [{_TOKEN: []}] if with_tokens else []}


def document(routes: Sequence[Route]) -> dict[str, Any]:
    """All but who may ask, which a change of the configuration may change."""
    schemas = _Schemas(routes)
    paths: dict[str, dict[str, Any]] = {}
    for row in routes:
        paths.setdefault(row.path, {})[row.method.lower()] = _operation(row, schemas)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Sidecar's admin port",
            "version": __version__,
            "description": "What a sidecar did, does and shall do. Lists come in pages: `next_cursor` of one is the "
            "`cursor` of the next. A GET is answered to HEAD too.",
        },
        "paths": paths,
        "components": {
            "schemas": schemas.definitions,
            "securitySchemes": {
                _TOKEN: {"type": "http", "scheme": "bearer", "description": "A token of `admin.token_file`."}
            },
        },
    }


class _Schemas:
    """The models of all rows, each defined once; those of queries are taken apart into parameters."""

    def __init__(self, routes: Sequence[Route]) -> None:
        wanted: dict[tuple[type[BaseModel], JsonSchemaMode], None] = {(ErrorAnswer, "serialization"): None}
        for row in routes:
            wanted |= {(row.query, "validation"): None, (row.body, "validation"): None}
            answers = (row.answer, *row.otherwise.values())
            wanted |= {(model, "serialization"): None for model in answers if model is not None}
        refs, defined = models_json_schema(list(wanted), ref_template=_REF)
        self._refs = refs
        self.definitions: dict[str, Any] = defined["$defs"]
        queries: set[type[BaseModel]] = {row.query for row in routes} | {NoBody}
        self._queries = {query: self.definitions.pop(self._name(query)) for query in queries}

    def _name(self, model: type[BaseModel], mode: JsonSchemaMode = "validation") -> str:
        return str(self._refs[model, mode]["$ref"]).rpartition("/")[2]

    def sent(self, model: type[BaseModel]) -> dict[str, Any]:
        return self._refs[model, "validation"]

    def answered(self, model: type[BaseModel]) -> dict[str, Any]:
        return self._refs[model, "serialization"]

    def is_required(self, model: type[BaseModel]) -> bool:
        return bool(self.definitions[self._name(model)].get("required"))

    def parameters(self, model: type[BaseModel]) -> Iterator[dict[str, Any]]:
        query = self._queries[model]
        for name, schema in query.get("properties", {}).items():
            told = {"description": schema["description"]} if "description" in schema else {}
            yield {
                "name": name,
                "in": "query",
                "required": name in query.get("required", ()),
                **told,
                "schema": _without_null(schema),
            }


def _without_null(schema: dict[str, Any]) -> dict[str, Any]:
    """A parameter that is not given is left out; there is no way to write null in a query."""
    kept = {key: value for key, value in schema.items() if key not in ("description", "title")}
    if kept.get("default", ...) is None:
        del kept["default"]
    choices = [choice for choice in kept.get("anyOf", ()) if choice != {"type": "null"}]
    if len(choices) == 1:
        return {**{key: value for key, value in kept.items() if key != "anyOf"}, **choices[0]}
    return {**kept, "anyOf": choices} if choices else kept


def _operation(row: Route, schemas: _Schemas) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "operationId": _operation_id(row),
        "summary": row.summary,
        "tags": [row.path.split("/")[1]],
        "parameters": [
            *(
                {"name": part, "in": "path", "required": True, "description": told, "schema": _part(row, part)}
                for part, told in row.parts.items()
            ),
            *schemas.parameters(row.query),
            *(
                {"name": name, "in": "header", "description": told, "schema": {"type": "string"}}
                for name, told in row.fields.items()
            ),
        ],
        "responses": dict(_responses(row, schemas)),
        "x-sidecar-role": "read" if row.method == _LOOKING else "operate",
    }
    if row.body is not NoBody:
        content = {JSON: {"schema": schemas.sent(row.body)}}
        operation["requestBody"] = {"required": schemas.is_required(row.body), "content": content}
    return operation


def _part(row: Route, part: str) -> dict[str, Any]:
    words = row.one_of.get(part)
    return {"enum": list(words)} if words is not None else {"type": "string", "minLength": 1}


def _operation_id(row: Route) -> str:
    words = re.findall(r"[A-Za-z]+", row.path) or ["page"]
    return "_".join([row.method.lower(), *words])


def _responses(row: Route, schemas: _Schemas) -> Iterator[tuple[str, Any]]:
    good = {kind: {"schema": {"type": "string"}} for kind in row.also}
    if row.answer is not None:
        good = {JSON: {"schema": schemas.answered(row.answer)}, **good}
    yield "200", {"description": "As asked.", "content": good}
    for status, model in sorted(row.otherwise.items()):
        shape = {JSON: {"schema": schemas.answered(model)}}
        yield str(status), {"description": _described(model, status), "content": shape}
    refusals = {*_ALWAYS, *row.refusals, *(_WITH_A_BODY if row.body is not NoBody else ())}
    for status in sorted(refusals - row.otherwise.keys()):
        content = {JSON: {"schema": schemas.answered(ErrorAnswer)}}
        if status == HTTPStatus.NOT_FOUND and HTML in row.also:
            content[HTML] = {"schema": {"type": "string"}}
        told = {"description": _MEANING.get(status, HTTPStatus(status).phrase), "content": content}
        yield str(status), told | ({"headers": _HEADERS[status]} if status in _HEADERS else {})


def _described(model: type[BaseModel], status: int) -> str:
    return " ".join((model.__doc__ or HTTPStatus(status).phrase).split())
