"""The command line. Results go to stdout, everything else to stderr."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

import lily
from lily import cli_serve
from lily.bench.cli import bench
from lily.errors import LilyError
from lily.selftest.cli import selftest


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(lily.__version__, message="%(version)s")
def cli() -> None:
    """Local inference for Qwen3.5 and 3.6 from 4-bit checkpoints."""


_model_options = [
    click.option("--model", "-m", help="Directory or Hub id; the shipped demo model when left out."),
    click.option("--revision", help="Branch, tag or commit of a Hub id."),
    click.option("--refresh", is_flag=True, help="Ask the Hub for updates even if a local copy is complete."),
    click.option("--device", default="auto", show_default=True, help="A name listed by `lily devices`."),
    click.option("--max-context", type=click.IntRange(min=1), help="Most tokens of a session."),
    click.option("--memory-limit", type=click.IntRange(min=1), help="Bytes for weights, state and workspace."),
    click.option("--quantize", type=int, help="4 or 8: pack unquantised matrices at load."),
]
_sampling_options = [
    click.option("--temperature", type=float, help="0 is greedy; left out, the checkpoint's value."),
    click.option("--top-k", type=int, help="Keep the k likeliest tokens; 0 keeps all."),
    click.option("--top-p", type=float, help="Keep the smallest set that reaches this probability."),
    click.option("--min-p", type=float, help="Drop tokens below this fraction of the likeliest."),
    click.option("--repetition-penalty", type=float, help="Over all tokens; 1 is none."),
    click.option("--presence-penalty", type=float, help="Over the output; 0 is none."),
    click.option("--frequency-penalty", type=float, help="Over the output; 0 is none."),
    click.option("--seed", type=int, help="Same seed, same text; left out, a fresh one."),
]


def _add(options: list[Any]) -> Callable[[Any], Any]:
    def decorate(function: Any) -> Any:
        for option in reversed(options):
            function = option(function)
        return function

    return decorate


@cli.command()
@click.argument("prompt")
@_add(_model_options)
@_add(_sampling_options)
@click.option("--max-tokens", "-n", type=click.IntRange(min=0), help="Left out: to the end token or the context limit.")
@click.option("--stop", multiple=True, help="End before this text; may be given several times.")
@click.option("--logprobs", type=click.IntRange(0, 20), default=0, help="Alternatives for each token, in --json.")
@click.option("--ignore-eos", is_flag=True, help="Go on past end tokens.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of the text.")
def generate(prompt: str, as_json: bool, stop: tuple[str, ...], **options: Any) -> None:
    """Continue PROMPT ("-" reads it from standard input)."""
    text = sys.stdin.read() if prompt == "-" else prompt
    with _load(options) as model:
        if as_json:
            answer = model.generate(text, stop=list(stop), **options)
            _print_json({"model": model.source, "prompt": text, **answer.to_dict()})
            return
        chunk = None
        for chunk in model.stream(text, stop=list(stop), **options):
            click.echo(chunk.text, nl=False)
            sys.stdout.flush()
        click.echo()
        if chunk is not None and sys.stderr.isatty():
            click.echo(f"{chunk.timing} ({chunk.finish_reason})", err=True)


@cli.command()
@_add(_model_options)
@_add(_sampling_options)
@click.option("--system", help="System text at the head of the conversation.")
@click.option("--thinking/--no-thinking", default=None, help="With or without thoughts; left out, as the template has it.")
@click.option("--max-tokens", "-n", type=click.IntRange(min=1), help="Of each answer; left out: to the end token or the context limit.")
def chat(system: str | None, **options: Any) -> None:
    """A conversation. /reset, /save FILE, /load FILE, /exit; Ctrl-C stops the answer, not the program."""
    from lily.cli_chat import Talk

    with _load(options) as model:
        Talk(model, system, options).run()


def _load(options: dict[str, Any]) -> lily.Model:
    names = ("revision", "refresh", "device", "max_context", "memory_limit", "quantize")
    loading = {name: options.pop(name) for name in names}
    source = options.pop("model")
    return lily.Model.demo(**loading) if source is None else lily.Model.from_pretrained(source, **loading)


@cli.command()
@click.argument("source")
@click.option("--revision", help="Branch, tag or commit of a Hub id.")
@click.option("--device", default="auto", show_default=True, help="Whose programs: cpu, metal, sim, cuda; it need not be here.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object, with every dispatch.")
@click.option("--picture", type=click.Path(dir_okay=False), help="Draw the step's dispatches into this SVG file.")
@click.option("--layers", help="Only these layers in the picture: 0,3")
def plan(source: str, revision: str | None, device: str, as_json: bool, picture: str | None, layers: str | None) -> None:
    """What a decode step of SOURCE (a config.json, a directory or a Hub id) does and needs."""
    result = lily.plan(source, revision=revision, device=device)
    if picture:
        from lily.picture import draw

        prefixes = tuple(f"layers.{n.strip()}." for n in layers.split(",")) if layers else ()
        title = f"One decode step of {result.model_type}: {result.decode['dispatches']} dispatches in {result.decode['stages']} stages"
        if layers:
            title += f"; layers {layers}"
        with open(picture, "w", encoding="utf-8") as file:
            file.write(draw(result.decode["forward"], title, prefixes))
        click.echo(f"wrote {picture}")
        return
    if as_json:
        _print_json(result.to_dict())
    else:
        click.echo(str(result))


@cli.command()
@click.argument("model_id", metavar="ID")
@click.option("--revision", help="Branch, tag or commit.")
@click.option("--refresh", is_flag=True, help="Ask the Hub for updates even if a local copy is complete.")
def pull(model_id: str, revision: str | None, refresh: bool) -> None:
    """Download the Hub's model ID (owner/name), only the files that Lily needs, and print where it is.

    The configuration is checked before any weight is downloaded; an interrupted download goes on where it was.
    """
    from lily import hub

    if hub.local_directory(model_id) is not None:
        raise click.UsageError(f"{model_id} is a directory; pull takes a Hub id")
    click.echo(str(hub.resolve(model_id, revision=revision, refresh=refresh)))


@cli.command("inspect")
@click.argument("source")
@click.option("--revision", help="Branch, tag or commit of a Hub id.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def inspect_command(source: str, revision: str | None, as_json: bool) -> int:
    """Is SOURCE (a directory or a downloaded Hub id) whole and sane? Exits 0 if so, else 1."""
    report = lily.inspect(source, revision=revision)
    if as_json:
        _print_json(report.to_dict())
    else:
        click.echo(str(report))
    return 0 if report.ok else 1


@cli.command()
@click.argument("source")
@click.argument("destination", type=click.Path())
@click.option("--bits", type=click.Choice(["2", "3", "4", "5", "6", "8"]), default="4", show_default=True, help="Bits of a code.")
@click.option("--group", type=click.Choice(["32", "64", "128"]), default="64", show_default=True, help="Columns that share a scale.")
@click.option("--revision", help="Branch, tag or commit of a Hub id.")
def convert(source: str, destination: str, bits: str, group: str, revision: str | None) -> None:
    """Quantise SOURCE (a directory or a Hub id) into the new directory DESTINATION, in MLX's format.

    After an interruption the same command goes on from the last finished shard.
    """
    from lily.convert import convert

    click.echo(str(convert(source, destination, bits=int(bits), group=int(group), revision=revision)))


@cli.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def devices(as_json: bool) -> None:
    """The devices of this machine, the default one first."""
    found = lily.devices()
    if as_json:
        _print_json({"devices": [vars(device) for device in found]})
    else:
        for device in found:
            click.echo(str(device))


@cli.command("eval")
@click.argument("model", type=click.Path(exists=True, file_okay=False))
@click.argument("text", type=click.Path(exists=True, dir_okay=False))
@click.option("--against", type=click.Choice(["mlx-lm"]), default="mlx-lm", show_default=True, help="The engine to compare with.")
@click.option("--device", default="auto", show_default=True, help="A name listed by `lily devices`.")
@click.option(
    "--positions", type=click.IntRange(min=1), default=4096, show_default=True, help="Predictions compared, at least, if TEXT has them."
)
@click.option("--window", type=click.IntRange(min=1), default=1024, show_default=True, help="Tokens read from an empty state.")
@click.option("--domain", help="Of a .jsonl file: only texts whose field `domain` is this.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def eval_command(model: str, text: str, against: str, device: str, positions: int, window: int, domain: str | None, as_json: bool) -> None:
    """Teacher-force TEXT (a text file, or .jsonl with a field `text`) through the checkpoint MODEL and through MLX-LM.

    Says how often both have float32's top token, and how far their perplexities are from float32's.
    """
    from lily import evaluation

    with lily.Model.from_pretrained(model, device=device, progress=False) as loaded:
        ids = loaded.encode(evaluation.read_text(Path(text), domain))
        chunks = evaluation.windows(ids, window, positions)
        result = evaluation.against_mlx(loaded, chunks, lambda done, total: click.echo(f"{done} of {total}", err=True))
    if as_json:
        _print_json(result.to_dict())
    else:
        click.echo(str(result))


cli.add_command(bench)
cli.add_command(selftest)


@cli.command()
def version() -> None:
    """The version of Lily."""
    click.echo(lily.__version__)


cli.add_command(cli_serve.command(_model_options, _sampling_options, _load))


def _print_json(value: dict[str, Any]) -> None:
    click.echo(json.dumps(value, ensure_ascii=False, indent=2))


def main(args: list[str] | None = None) -> None:
    """Entry point. Exits 0, 1 for an error (one line on stderr), 2 for wrong usage, 130 after Ctrl-C."""
    try:
        code = cli.main(args, prog_name="lily", standalone_mode=False)
    except click.exceptions.Abort:
        click.echo(err=True)
        sys.exit(130)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except BrokenPipeError:
        # The reader went away; the interpreter must not try to flush again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except (LilyError, ValueError, OSError, ImportError) as error:
        click.echo(f"Error: {' '.join(str(error).split())}", err=True)
        sys.exit(1)
    sys.exit(code if isinstance(code, int) else 0)
