"""Running a server: in the foreground until a signal, or in a thread beside a program."""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
from types import FrameType
from typing import Any

import uvicorn
from sse_starlette.sse import AppStatus

from lily.model import Model
from lily.server.app import create_app
from lily.server.settings import Settings

_log = logging.getLogger("lily.server")
_STOP_SECONDS = 2.0  # what Ctrl-C leaves to requests that are running


class _Uvicorn(uvicorn.Server):
    """SIGTERM lets running requests end within `drain_seconds`; Ctrl-C lets them stop soon, a second one at once."""

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        scheduler = self.config.app.state.server.scheduler  # type: ignore[union-attr]
        if sig == signal.SIGINT:
            self.force_exit = self.should_exit  # uvicorn's own way of a second Ctrl-C
            self.config.timeout_graceful_shutdown = int(_STOP_SECONDS) + 1
            # From a thread: the signal may have interrupted the one that holds the scheduler's lock.
            threading.Thread(target=scheduler.drain, args=(0 if self.force_exit else _STOP_SECONDS,), daemon=True).start()
        else:
            threading.Thread(target=scheduler.drain, args=(self.config.app.state.server.settings.drain_seconds,), daemon=True).start()  # type: ignore[union-attr]
        self.should_exit = True


def _server(model: Model, settings: Settings) -> _Uvicorn:
    AppStatus.disable_automatic_graceful_drain()  # streams end when their requests do
    app = create_app(model, settings)
    config = uvicorn.Config(
        app, host=settings.host, port=settings.port, log_config=None, access_log=False, lifespan="on", server_header=False,
        timeout_graceful_shutdown=int(settings.drain_seconds) + 5, timeout_keep_alive=75, ws="none",
    )  # fmt: skip
    return _Uvicorn(config)


def _listen(settings: Settings) -> socket.socket:
    """A listening socket; its failure is an OSError that names the address."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    found = socket.socket(family, socket.SOCK_STREAM)
    try:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind((settings.host, settings.port))
        found.listen(2048)
    except OSError as error:
        found.close()
        raise OSError(error.errno, f"{settings.host}:{settings.port}: {os.strerror(error.errno or 0)}") from error
    return found


def _url(settings: Settings, listening: socket.socket) -> str:
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    return f"http://{host}:{listening.getsockname()[1]}"


def serve(model: Model, **options: Any) -> None:
    """Serve a model over HTTP until SIGTERM or Ctrl-C.

    - `host`, `port`: where to listen; the default is this machine only. Port 0 takes a free one.
    - `aliases`: further names of the model. `any_model`: answer whatever name a request has.
    - `api_key`: asked of every request. `cors_origins`: web pages of other sites that may call, `["*"]` for all.
      `allowed_hosts`: names under which the server may be called, besides addresses and localhost.
    - `max_active`: requests that take turns on the device. `max_queue`: requests that may wait; one more gets 429.
    - `max_body_bytes`, `max_depth`: of a request's JSON.
    - `keep_alive_seconds`: between two comments in a stream that has nothing else to say.
    - `drain_seconds`: what SIGTERM leaves to running requests.
    - `sampling`: a `lily.Sampling` for what requests leave open, over the checkpoint's defaults.
    - `log_prompts`: prompts appear in the log. `page`: a chat page at "/".

    Raises `ValueError` for a bad option, `OSError` when the address cannot be had, `ImportError` without the extra `server`.

    >>> import lily
    >>> try:
    ...     lily.serve(lily.Model.demo(), port=-1)
    ... except ValueError as error:
    ...     print(error)
    port is -1, expected 0 to 65535
    """
    settings = Settings(**options)
    with _listen(settings) as listening:
        server = _server(model, settings)
        url = _url(settings, listening)
        _log.info("serving %s at %s (a chat at %s/, for clients %s/v1); Ctrl-C ends", model.source, url, url, url)
        try:
            server.run(sockets=[listening])
        finally:
            server.config.app.state.server.scheduler.close()  # type: ignore[union-attr]


class Background:
    """A server in a thread of its own, for programs and tests: a context manager with the server's `url`.

    The options are those of `lily.serve`; the port is a free one unless given.
    """

    def __init__(self, model: Model, **options: Any) -> None:
        self.settings = Settings(**{"port": 0, **options})
        self._listening = _listen(self.settings)
        self.url = _url(self.settings, self._listening)
        self._server = _server(model, self.settings)
        self.state = self._server.config.app.state.server  # type: ignore[union-attr]
        self._thread = threading.Thread(target=self._server.run, args=([self._listening],), name="lily-server", daemon=True)

    def __enter__(self) -> Background:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        """Cancel what runs and stop."""
        self.state.scheduler.drain(0)
        self._server.should_exit = True
        self._thread.join()
        self.state.scheduler.close()
        self._listening.close()
