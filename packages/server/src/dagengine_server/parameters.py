"""URL parameters of a route as one model: read at once, and described in OpenAPI as each by itself."""

from __future__ import annotations

from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.requests import Request

from dagengine import DagError

Parameters = TypeVar("Parameters", bound=BaseModel)


class PrepareParameters(BaseModel):
    """Of `/v1/query/prepare`."""

    model_config = ConfigDict(frozen=True)
    cache_salt: str | None = Field(
        None, min_length=1, max_length=256, description="States and reuse are shared only within one salt."
    )
    position: str | None = Field(
        None, min_length=1, max_length=64, description="The position policy of every node."
    )
    backend: str | None = Field(
        None, min_length=1, max_length=64, description="The attention backend of every node."
    )


class ExecuteParameters(PrepareParameters):
    """Of `/v1/query/execute`."""

    stream: bool = Field(False, description="Server-sent events of text completions, in place of one answer.")
    reduce: int | None = Field(
        None, ge=2, description="Reduce judges declared closed to groups of so many candidates; not exact."
    )
    keep_ttl_s: float | None = Field(
        None, gt=0, le=10**9, description="Keep the answers' states for so many seconds."
    )


def read_parameters(request: Request, model: type[Parameters]) -> Parameters:
    """The request's URL parameters. Raises DagError `invalid_request`, naming one that is wrong, unknown or there
    twice."""
    items = request.query_params.multi_items()
    check_names([name for name, _ in items], list(model.model_fields))
    try:
        return model.model_validate(dict(items))
    except ValidationError as error:
        found = error.errors(include_url=False)[0]
        raise DagError("invalid_request", found["msg"], str(found["loc"][-1])) from None


def check_names(given: list[str], known: list[str]) -> None:
    """Refuse URL parameters that a route does not have, or has twice. Raises DagError `invalid_request`."""
    unknown = list(dict.fromkeys(name for name in given if name not in known))
    if unknown:
        names = ", ".join(repr(name[:100]) for name in unknown[:8])
        rule = f"this route has {', '.join(known)}" if known else "this route has none"
        raise DagError("invalid_request", f"unknown URL parameters {names}; {rule}", unknown[0])
    twice = next((name for name in given if given.count(name) > 1), None)
    if twice is not None:
        raise DagError("invalid_request", "give this URL parameter once", twice)


def described(model: type[BaseModel]) -> list[dict[str, Any]]:
    """OpenAPI's parameter objects."""
    found = []
    for name, schema in model.model_json_schema()["properties"].items():
        kept = {key: value for key, value in schema.items() if (key, value) != ("default", None)}
        about = {"description": schema["description"]}
        found.append({"name": name, "in": "query", "required": False, "schema": kept, **about})
    return found
