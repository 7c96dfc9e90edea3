"""The OpenAPI description: routes parse their bodies themselves, so their schemas are added here."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from pydantic.json_schema import models_json_schema

from .protocol import BODIES

REF = "#/components/schemas/"
OPTIONAL = ("RetainBody", "MoveBody")
ERROR: dict[str, Any] = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"], "description": "The field at fault."},
                "code": {"type": "string"},
            },
        }
    },
}
GRAPH: dict[str, Any] = {
    "type": "object",
    "required": ["format", "nodes"],
    "additionalProperties": False,
    "properties": {
        "format": {"const": "dagengine.graph/v1"},
        "model": {"type": "string"},
        "stream": {"type": "boolean", "default": False},
        "position": {"type": "object"},
        "backend": {"type": "string"},
        "cache_salt": {"type": "string", "minLength": 1, "maxLength": 256},
        "nodes": {"type": "array", "minItems": 1, "items": {"$ref": f"{REF}GraphNode"}},
    },
}
NODE: dict[str, Any] = {
    "type": "object",
    "required": ["id", "input"],
    "additionalProperties": False,
    "properties": {
        "id": {"type": "string"},
        "input": {"description": "Text, token ids, or messages."},
        "context": {
            "type": "array",
            "items": {
                "type": "object",
                "description": "`node` or `state`, and `mode`, `span`, `at`, `start`.",
            },
        },
        "generate": {"type": "object", "description": "Sampling options; absent: nothing is sampled."},
        "keep": {"type": "object"},
        "position": {"type": "object"},
        "backend": {"type": "string"},
        "add_special_tokens": {"type": "boolean"},
    },
}


SPAN_QUERY: dict[str, Any] = {
    "type": "object",
    "description": "A span query: an object of one member, its constructor, as spnl writes it (`g`, `repeat`, `map`, "
    '`plus`, `cross`, `user`, …), or `{"format": "dagengine.query/v1", "query": {…}}`. May be sent as text/plain.',
}


def describe(app: FastAPI) -> None:
    """Complete the application's description with bodies and errors."""
    generate = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _completed(generate())
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


def _completed(schema: dict[str, Any]) -> dict[str, Any]:
    _, bodies = models_json_schema([(body, "validation") for body in BODIES], ref_template=REF + "{model}")
    parts = schema.setdefault("components", {}).setdefault("schemas", {})
    for name in ("HTTPValidationError", "ValidationError"):
        parts.pop(name, None)
    parts.update({**bodies["$defs"], "Error": ERROR, "GraphDocument": GRAPH, "GraphNode": NODE})
    parts["SpanQuery"] = SPAN_QUERY
    for operations in schema["paths"].values():
        for operation in operations.values():
            body = operation.pop("x-body", None)
            if body is not None:
                content = {"application/json": {"schema": {"$ref": REF + body}}}
                if body == "SpanQuery":
                    content["text/plain"] = {"schema": {"type": "string"}}
                operation["requestBody"] = {"required": body not in OPTIONAL, "content": content}
            responses = operation["responses"]
            responses.pop("422", None)
            responses["default"] = {
                "description": "A refusal or a failure.",
                "content": {"application/json": {"schema": {"$ref": f"{REF}Error"}}},
            }
    schema["components"]["schemas"] = dict(sorted(parts.items()))
    return schema
