"""`lily serve`: the command around `lily.serve`."""

from __future__ import annotations

import logging
from typing import Any

import click

_options = [
    click.option("--host", default="127.0.0.1", show_default=True, help="Where to listen; the default is this machine only."),
    click.option("--port", type=click.IntRange(0, 65535), default=8000, show_default=True, help="0 takes a free one."),
    click.option("--alias", "aliases", multiple=True, help="A further name of the model."),
    click.option("--any-model", is_flag=True, help="Answer whatever model a request names."),
    click.option("--api-key", envvar="LILY_API_KEY", show_envvar=True, help="Asked of every request."),
    click.option("--cors-origin", "cors_origins", multiple=True, help="A web page's origin that may call; '*' for all."),
    click.option("--allowed-host", "allowed_hosts", multiple=True, help="A name under which the server may be called."),
    click.option(
        "--max-active", type=click.IntRange(1, 1024), default=16, show_default=True, help="Requests that take turns on the device."
    ),
    click.option("--max-queue", type=click.IntRange(0), default=128, show_default=True, help="Requests that may wait; one more gets 429."),
    click.option("--max-body-bytes", type=click.IntRange(1024), default=32 << 20, show_default=True, help="Of a request."),
    click.option("--drain-seconds", type=float, default=30.0, show_default=True, help="What SIGTERM leaves to running requests."),
    click.option("--log-prompts", is_flag=True, help="Prompts appear in the log."),
    click.option("--page/--no-page", default=True, help="A chat page at /."),
]
_OWN = (
    "host", "port", "aliases", "any_model", "api_key", "cors_origins", "allowed_hosts", "max_active", "max_queue", "max_body_bytes",
    "drain_seconds", "log_prompts", "page",
)  # fmt: skip
_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "seed")


def command(model_options: list[Any], sampling_options: list[Any], load: Any) -> click.Command:
    """The command, with the options that it shares with the others, and their way of loading a model."""

    def serve(model: str | None, **options: Any) -> None:
        """Serve MODEL (a directory or a Hub id; the shipped demo model when left out) to OpenAI's and Anthropic's clients.

        The sampling options are for what requests leave open.
        """
        import lily
        from lily.server import serve as run

        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
        sampling = lily.Sampling(**{name: options.pop(name) for name in _SAMPLING})
        serving = {name: options.pop(name) for name in _OWN}
        with load({**options, "model": model}) as loaded:
            run(loaded, sampling=sampling, **serving)

    for option in reversed([click.argument("model", required=False), *model_options[1:], *sampling_options, *_options]):
        serve = option(serve)
    return click.command("serve")(serve)
