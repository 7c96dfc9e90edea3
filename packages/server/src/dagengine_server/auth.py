"""Who may ask: API keys, compared in constant time. Guards every route but `/health*`."""

from __future__ import annotations

import hmac

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from dagengine import DagError

from .errors import error_response
from .service import Tenant


class Authentication:
    """ASGI middleware that puts the tenant into `scope["state"]["tenant"]`, or answers 401.

    Args:
        keys: empty lets everybody in as one tenant.
    """

    def __init__(self, app: ASGIApp, keys: tuple[str, ...]) -> None:
        self._app = app
        self._tenants = [(key.encode(), Tenant.of_key(key)) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            tenant = self._tenant(scope)
            if tenant is None:
                error = DagError(
                    "invalid_api_key", "send a valid key as `Authorization: Bearer KEY`", "Authorization"
                )
                await error_response(error)(scope, receive, send)
                return
            scope.setdefault("state", {})["tenant"] = tenant
        await self._app(scope, receive, send)

    def _tenant(self, scope: Scope) -> Tenant | None:
        if not self._tenants or is_health(scope["path"]):
            return Tenant()
        kind, _, given = Headers(scope=scope).get("authorization", "").partition(" ")
        sent = given.strip().encode("latin-1", "replace") if kind.lower() == "bearer" else b""
        found = None
        for key, tenant in self._tenants:
            if hmac.compare_digest(key, sent):
                found = tenant
        return found


def is_health(path: str) -> bool:
    """Whether the route tells only whether the server is well."""
    return path in ("/health", "/health/ready")
