"""The server's OpenAPI document: which replies there are and how they look, held to by a fuzzer in the tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

Schema = dict[str, Any]

ERRORS = {
    "400": "a request that cannot be honoured",
    "401": "wrong API key",
    "404": "unknown model",
    "413": "body too large",
    "429": "too many requests wait",
    "500": "the model failed",
    "503": "shutting down, or failed",
    "504": "out of time",
}
GUARDED_ERRORS = ("400", "401", "413")
TEXT_OR_NULL = {"type": ["string", "null"]}


def _object(**properties: Schema) -> Schema:
    """An object that has all of these."""
    return {"type": "object", "properties": properties, "required": list(properties)}


def _named(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


TEXT, COUNT = {"type": "string"}, {"type": "integer", "minimum": 0}
REASON = {"enum": ["stop", "length"]}
LOGPROBS = {"type": ["object", "null"]}


def _completion(kind: str, **choice: Schema) -> Schema:
    choices = {"type": "array", "items": _object(index=COUNT, logprobs=LOGPROBS, finish_reason=REASON, **choice)}
    return _object(id=TEXT, object={"const": kind}, created=COUNT, model=TEXT, choices=choices, usage=_named("Usage"))


SCHEMAS: dict[str, Schema] = {
    "Error": _object(error=_object(message=TEXT, type=TEXT, param=TEXT_OR_NULL, code=TEXT_OR_NULL)),
    "Usage": _object(
        prompt_tokens=COUNT,
        completion_tokens=COUNT,
        total_tokens=COUNT,
        prompt_tokens_details=_object(cached_tokens=COUNT),
        mode=TEXT,
        nfe=COUNT,
        nfe_prefill=COUNT,
        tpf={"type": "number"},
        tpf_end_to_end={"type": "number"},
    ),
    "ChatCompletion": _completion("chat.completion", message=_object(role={"const": "assistant"}, content=TEXT)),
    "TextCompletion": _completion("text_completion", text=TEXT),
    "Model": _object(id=TEXT, object={"const": "model"}, created=COUNT, owned_by=TEXT),
    "ModelList": _object(object={"const": "list"}, data={"type": "array", "items": _named("Model")}),
    "Health": _object(status={"enum": ["ok", "draining", "failed"]}),
}

# By path: what a 200 holds, and the errors beside those of everything under /v1/.
Reply = tuple[Schema, tuple[str, ...]]
STREAM = {"text/event-stream": {"schema": TEXT}}
ANSWER_ERRORS = ("404", "429", "500", "503", "504")
REPLIES: dict[str, Reply] = {
    "/v1/chat/completions": (_named("ChatCompletion"), ANSWER_ERRORS),
    "/v1/completions": (_named("TextCompletion"), ANSWER_ERRORS),
    "/v1/models": (_named("ModelList"), ()),
    "/v1/models/{name}": (_named("Model"), ("404",)),
}


def describer(app: FastAPI, needs_key: bool) -> Callable[[], Schema]:
    """What FastAPI calls for the document, which is made once."""
    made: list[Schema] = []

    def document() -> Schema:
        if not made:
            made.append(describe(get_openapi(title=app.title, version=app.version, routes=app.routes), needs_key))
        return made[0]

    return document


def describe(document: Schema, needs_key: bool) -> Schema:
    """FastAPI's document with our replies in the place of its own."""
    components = document.setdefault("components", {})
    schemas = components.setdefault("schemas", {})
    for unused in ("HTTPValidationError", "ValidationError"):
        schemas.pop(unused, None)
    schemas.update(SCHEMAS)
    for path, (schema, errors) in REPLIES.items():
        for method, operation in document["paths"][path].items():
            content: Schema = {"application/json": {"schema": schema}}
            operation["responses"] = {
                "200": {"description": "the answer", "content": content | (STREAM if method == "post" else {})}
            } | {code: _error(ERRORS[code]) for code in sorted({*GUARDED_ERRORS, *errors})}
            if needs_key:
                operation["security"] = [{"key": []}]
    health = {"content": {"application/json": {"schema": _named("Health")}}}
    document["paths"]["/health"]["get"]["responses"] = {
        "200": {"description": "takes requests"} | health,
        "503": {"description": ERRORS["503"]} | health,
    }
    document["paths"]["/metrics"]["get"]["responses"] = {
        "200": {"description": "for Prometheus", "content": {"text/plain": {"schema": TEXT}}}
    }
    if needs_key:
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    return document


def _error(description: str) -> Schema:
    return {"description": description, "content": {"application/json": {"schema": _named("Error")}}}
