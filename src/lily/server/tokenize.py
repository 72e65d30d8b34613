"""POST /v1/tokenize: the ids of a text, or of the prompt that messages become."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from lily.server.body import checked, json_object
from lily.server.errors import bad_request
from lily.server.exchange import Server, in_thread, json_response
from lily.server.fields import strict_messages, strict_tools
from lily.server.schema import TokenizeRequest
from lily.stepping import ChatSteps

_CHAT = ("tools", "tool_choice", "reasoning_effort", "enable_thinking", "chat_template_kwargs", "drop_volatile")


async def tokenize(request: Request) -> Response:
    """The endpoint."""
    server: Server = request.app.state.server
    body = checked(TokenizeRequest, await json_object(request, server.settings))
    server.names.check(body.model)
    if (body.text is None) == (body.messages is None):
        raise bad_request("or messages must be given, and not both", "text")
    options = {name: value for name in _CHAT if (value := getattr(body, name)) is not None}
    if body.messages is None:
        if options:
            raise bad_request("needs messages", next(iter(options)))
        ids = await in_thread(lambda: server.model.encode(body.text or ""))
    else:
        strict_messages(body.messages)
        strict_tools(body.tools)
        messages = body.messages
        ids = (await in_thread(lambda: ChatSteps(server.model, messages, options))).prompt_ids
    found: dict[str, Any] = {"object": "tokens", "count": len(ids), "max_context": server.model.max_context, "tokens": ids}
    if body.pieces:
        found["pieces"] = [list(server.model.tokenizer.token_bytes(token)) for token in ids]
    return json_response(found)
