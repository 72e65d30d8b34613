"""The chat page: three files of the package, without anything from elsewhere."""

from __future__ import annotations

from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response

from lily.server.errors import ApiError

_FOLDER = Path(__file__).parent / "page"
_KINDS = {"index.html": "text/html; charset=utf-8", "page.css": "text/css; charset=utf-8", "page.js": "text/javascript; charset=utf-8"}
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


async def page(request: Request) -> Response:
    """GET / and GET /page/NAME."""
    name = request.path_params.get("name", "index.html")
    if name not in _KINDS:
        raise ApiError(404, f"there is no {request.url.path}")
    return Response((_FOLDER / name).read_bytes(), headers=_HEADERS, media_type=_KINDS[name])
