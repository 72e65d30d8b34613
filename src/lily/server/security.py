"""What every request must pass: its Host and Origin headers, and the API key."""

from __future__ import annotations

import hmac
import ipaddress
import json
import socket
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from lily.server.errors import ApiError
from lily.server.settings import Settings

# Without a key: the page, which asks for it, and what a supervisor polls.
_OPEN = ("/", "/health", "/favicon.ico")


class Gate:
    """ASGI middleware. A name that a web page made to resolve to this machine (DNS rebinding) is refused by its Host
    header, a page of another site by its Origin header, everybody else by the key when one is set."""

    def __init__(self, app: ASGIApp, settings: Settings) -> None:
        self._app = app
        self._key = settings.api_key.encode() if settings.api_key is not None else None
        self._origins = {origin.rstrip("/").lower() for origin in settings.cors_origins}
        self._names = {"localhost", *(name.lower() for name in settings.allowed_hosts)}
        if not _is_loopback(settings.host):
            self._names |= {settings.host.lower(), socket.gethostname().lower(), f"{socket.gethostname().lower()}.local"}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            error = self._refusal(scope["path"], Headers(scope=scope))
            if error is not None:
                await _answer(error, scope["path"], send)
                return
        await self._app(scope, receive, send)

    def _refusal(self, path: str, headers: Headers) -> ApiError | None:
        host = headers.get("host", "")
        if not self._knows(host):
            what = f"the Host header is {host[:100]!r}; start the server with allowed_hosts (--allowed-host) to accept it"
            return ApiError(403, what, code="host_not_allowed")
        origin = headers.get("origin", "")
        if origin and origin.lower() not in self._origins and "*" not in self._origins and urlsplit(origin).netloc.lower() != host.lower():
            what = f"the Origin header is {origin[:100]!r}; start the server with cors_origins (--cors-origin) to accept it"
            return ApiError(403, what, code="origin_not_allowed")
        if self._key is not None and path not in _OPEN and not path.startswith("/page/"):
            scheme, _, token = headers.get("authorization", "").partition(" ")
            given = token.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
            if not hmac.compare_digest(given.encode("latin-1", "replace"), self._key):
                what = "wrong API key" if given else "an API key is needed, as in 'Authorization: Bearer KEY'"
                return ApiError(401, what, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
        return None

    def _knows(self, host: str) -> bool:
        """An address cannot be rebound, so any is good; a name must be known."""
        try:
            name = urlsplit(f"//{host}").hostname or ""
        except ValueError:
            return False
        if name in self._names or "*" in self._names:
            return True
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


async def _answer(error: ApiError, path: str, send: Send) -> None:
    body = json.dumps(error.body(path)).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    headers += [(name.lower().encode(), value.encode()) for name, value in error.headers.items()]
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
