"""`lily bench` and its commands."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from lily.bench.measure import ROUNDS, STEPS

_shared = [
    click.option("--model", "-m", type=click.Path(exists=True, file_okay=False, path_type=Path), help="A checkpoint directory; left out, the shipped model."),
    click.option("--arm", "arms", multiple=True, help="lily[:DEVICE][@VARIANT], mlx-lm, llama.cpp[:q4_0|q4_k][@repack|mapped]; several times. The first is compared with the others."),
    click.option("--rounds", type=click.IntRange(min=ROUNDS), default=ROUNDS, show_default=True, help="Runs of each arm."),
    click.option("--steps", type=click.IntRange(min=1), default=STEPS, show_default=True, help="Decode steps after each prompt."),
    click.option("--threads", type=click.IntRange(min=1), help="Of every arm; left out, the CPUs of this process."),
    click.option("--llama-bench", help="llama.cpp's llama-bench; left out, $LILY_LLAMA_BENCH, else the one on PATH."),
    click.option("--output", type=click.Path(file_okay=False, path_type=Path), help="Write JSON, Markdown and a plot into this directory."),
    click.option("--json", "as_json", is_flag=True, help="Print JSON instead of Markdown."),
]  # fmt: skip


def _options(function: Any) -> Any:
    for option in reversed(_shared):
        function = option(function)
    return function


@click.group(invoke_without_command=True)
@_options
@click.option("--prompt", "prompts", type=click.IntRange(min=1), multiple=True, help="Prompt tokens; several times. Left out: 128 and 512.")
@click.pass_context
def bench(context: click.Context, prompts: tuple[int, ...], **options: Any) -> None:
    """Measure prefill and decode, side by side with other engines, in one run.

    Each arm runs in a fresh process with a warm-up of the same shape, in alternating order, at least five times; medians, spreads, the
    shares of this machine's measured limits and the ratios are printed. Impossible rates and ids that do not repeat are errors.
    """
    if context.invoked_subcommand is not None:
        return
    from lily.bench import harness, report
    from lily.bench.measure import Shape

    arms, setting = _prepare(options)
    shapes = [Shape(prompt, options["steps"]) for prompt in dict.fromkeys(prompts or (128, 512))]
    found = harness.measure(arms, shapes, setting, rounds=options["rounds"], say=_say)
    _give(options, "bench", report.to_dict(found), report.to_markdown(found), found)


@bench.command()
@_options
@click.option(
    "--budget",
    type=click.FloatRange(min=0),
    default=1800.0,
    show_default=True,
    help="Seconds; a length that is not expected to fit is left out.",
)
@click.option(
    "--length",
    "lengths",
    type=click.IntRange(min=1),
    multiple=True,
    help="Prompt tokens; several times. Left out: 256 to 131072, doubling.",
)
def sweep(budget: float, lengths: tuple[int, ...], **options: Any) -> None:
    """Prefill and decode at ten prompt lengths, 256 to 128K, against a peer on the same numbers."""
    from lily.bench import sweep as module
    from lily.config import ModelConfig

    arms, setting = _prepare(options)
    found = module.sweep(
        arms, setting, budget=budget, lengths=tuple(dict.fromkeys(lengths)) or module.LENGTHS, steps=options["steps"], rounds=options["rounds"],
        max_context=ModelConfig.from_file(setting.model).max_context, say=_say,
    )  # fmt: skip
    _give(options, "sweep", found.to_dict(), found.to_markdown(), found.bench)


@bench.command()
@click.option(
    "--model",
    "-m",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Whose kernels are timed; left out, the shipped model.",
)
@click.option("--device", default="auto", show_default=True, help="A name listed by `lily devices`.")
@click.option("--prompt", type=click.IntRange(min=1), default=512, show_default=True, help="Prompt tokens of the timed run.")
@click.option("--steps", type=click.IntRange(min=1), default=32, show_default=True, help="Decode steps of the timed run.")
@click.option("--output", type=click.Path(file_okay=False, path_type=Path), help="Write JSON, Markdown and a plot into this directory.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of Markdown.")
def limits(model: Path | None, device: str, prompt: int, steps: int, **options: Any) -> None:
    """What this machine's CPU can do at most, and each kernel's share of it."""
    import lily
    from lily.bench import limits as module
    from lily.bench import report
    from lily.bench.measure import prompt_ids
    from lily.bench.work import work_of
    from lily.model import DEMO

    directory = model or DEMO
    work = work_of(directory)
    sets = sorted({1 << 20, work.step_bytes, min(work.weight_bytes, module.MOST_BYTES), module.MOST_BYTES})
    found = module.measure_all(working_sets=tuple(sets))
    with lily.Model.from_pretrained(directory, device=device, progress=False) as loaded:
        profile = loaded.profile(prompt_ids(prompt, loaded.config.vocab_size).tolist(), steps=steps)
    result = {"machine": module.machine(), "limits": [limit.to_dict() for limit in found], "profile": profile.to_dict()}
    text = report.limits_markdown(found) + f"\n```\n{profile}\n```\n"
    _give(options, "limits", result, text, None)
    if options["output"] is not None and report.new_figure(1)[0] is not None:
        profile.plot().savefig(options["output"] / "limits.png", dpi=120)


@bench.command()
@click.argument("directory", type=click.Path(file_okay=False, path_type=Path))
@click.option("--size", default="35b-a3b", show_default=True, help="Whose widths: 0.8b to 397b-a17b.")
@click.option("--layers", type=click.IntRange(min=4), default=4, show_default=True, help="Every fourth is attention.")
@click.option("--experts", type=click.IntRange(min=1), help="Of each layer; left out, the released number.")
@click.option("--vocab", type=click.IntRange(min=6144), default=32768, show_default=True, help="Tokens of the vocabulary.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of the random weights.")
@click.option(
    "--gguf",
    "kinds",
    type=click.Choice(["q4_0", "q4_k"]),
    multiple=True,
    help="Also as GGUF, the same numbers, for llama.cpp; several times.",
)
def synthetic(directory: Path, size: str, layers: int, experts: int | None, vocab: int, seed: int, kinds: tuple[str, ...]) -> None:
    """Write a checkpoint of random weights with a released model's exact widths into DIRECTORY, for measuring speed.

    The same options give the same bytes. GGUF files go to DIRECTORY/gguf; those that are there already are kept.
    """
    from lily.bench import gguf_file
    from lily.bench import synthetic as module

    if size not in module.SIZES:
        raise click.UsageError(f"--size is {size!r}, expected one of {', '.join(module.SIZES)}")
    widths = module.SIZES[size]
    number = experts or widths.experts
    if widths.experts and number < widths.per_token:
        raise click.UsageError(f"--experts is {number}, expected at least the {widths.per_token} of each token")
    if (directory / "model.safetensors").is_file():
        if json.loads((directory / "config.json").read_text()) != module.config(layers, number, vocab, widths):
            raise click.UsageError(f"{directory} holds another checkpoint; choose another directory")
        _say(f"{directory} is there already")
    else:
        module.write(directory, layers, number, vocab, seed, size)
    files = [directory / "model.safetensors"]
    for kind in kinds:
        files.append(directory / "gguf" / f"{kind}.gguf")
        if not files[-1].is_file():
            gguf_file.write(directory, files[-1], kind)
    for file in files:
        click.echo(f"{file}: {file.stat().st_size / 1e9:.3f} GB")


def _prepare(options: dict[str, Any]) -> tuple[list[Any], Any]:
    """Arms and setting. Without --arm: lily, and llama.cpp where its program and a file for it are there."""
    import lily
    from lily.bench import limits as module
    from lily.bench import llama
    from lily.bench.arms import Arm, Setting
    from lily.model import DEMO

    program = llama.find(options["llama_bench"])
    try:
        arms = [Arm.parse(text) for text in options["arms"]]
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    if len({str(arm) for arm in arms}) != len(arms):
        raise click.UsageError("an arm is given twice")
    directory = options["model"] or DEMO
    if not arms:
        arms = [Arm("lily")]
        if program is not None and any((directory / "gguf").glob("q4_*.gguf")):
            arms.append(Arm("llama.cpp"))
    # The default device comes first; a stand-in for a GPU, there for tests, never does.
    gpu = lily.devices()[0].kind not in ("cpu", "sim") and not all(arm.device.startswith("cpu") for arm in arms if arm.engine == "lily")
    return arms, Setting(directory, options["threads"] or module.default_threads(), program, gpu)


def _give(options: dict[str, Any], name: str, found: dict[str, Any], markdown: str, bench: Any) -> None:
    from lily.bench import report

    click.echo(json.dumps(found, indent=1) if options["as_json"] else markdown, nl=options["as_json"])
    if options["output"] is not None:
        for file in report.write(options["output"], name, found, markdown, bench):
            _say(f"written: {file}")


def _say(line: str) -> None:
    click.echo(line, err=True)
