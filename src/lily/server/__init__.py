"""An HTTP server around a loaded model, as OpenAI's and Anthropic's clients expect it. Needs the extra `server`."""

from __future__ import annotations

import importlib.util

_NEEDED = ("starlette", "uvicorn", "sse_starlette", "msgspec", "prometheus_client")

for _name in _NEEDED:
    if importlib.util.find_spec(_name) is None:
        raise ImportError(f"the server needs {_name}: pip install 'lily-inference[server]'")

from lily.server.running import Background, serve  # noqa: E402
from lily.server.settings import Settings  # noqa: E402

__all__ = ["Background", "Settings", "serve"]
