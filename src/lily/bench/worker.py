"""One arm in a process of its own: reads a request as JSON from standard input, prints the times as JSON.

Every shape runs twice, the first time to warm up. The prefill clock starts before the prompt is given and ends when the first id is on
the host and the next step submitted; the decode clock goes on from there for the number of steps.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lily.bench.measure import digest, prompt_ids

# prefill seconds, decode seconds, ids
Times = tuple[float, float, list[int]]


def lily_runner(model_path: str, device: str, context: int) -> tuple[Callable[[Any, int], Times], int, dict[str, Any]]:
    """Lily's engine: its decoder has the next step in flight whenever it gives an id."""
    import lily

    begin = time.perf_counter()
    limit = lily.ModelConfig.from_file(Path(model_path)).max_context
    model = lily.Model.from_pretrained(model_path, device=device, max_context=min(limit, context), progress=False)
    loaded = time.perf_counter() - begin
    sampling = lily.Sampling.greedy().resolved().to_dict() | {"logprobs": -1, "masked": False}

    def run(ids: Any, steps: int) -> Times:
        session = model._native.session()
        start = time.perf_counter()
        session.append(ids)
        decoder = session.start(sampling, steps + 1)
        out = [decoder.next()[0]]
        first = time.perf_counter()
        for _ in range(steps):
            out.append(decoder.next()[0])
        end = time.perf_counter()
        decoder.close()
        session.close()
        return first - start, end - first, out

    about = {"version": lily.__version__, "device": str(model.device), "load_seconds": loaded}
    return run, model.config.vocab_size, about


def mlx_runner(model_path: str) -> tuple[Callable[[Any, int], Times], int, dict[str, Any]]:
    """MLX-LM's own generator, greedy; it too submits the next step before it gives an id."""
    import mlx.core as mx
    import mlx_lm
    from mlx_lm.generate import generate_step
    from mlx_lm.utils import load_model

    begin = time.perf_counter()
    model, config = load_model(Path(model_path))
    loaded = time.perf_counter() - begin
    text = config.get("text_config", config)

    def run(ids: Any, steps: int) -> Times:
        start = time.perf_counter()
        tokens = generate_step(mx.array(ids), model, max_tokens=steps + 1)
        out = [int(next(tokens)[0])]
        first = time.perf_counter()
        for _ in range(steps):
            out.append(int(next(tokens)[0]))
        end = time.perf_counter()
        tokens.close()
        return first - start, end - first, out

    about = {"version": f"{mlx_lm.__version__}, mlx {mx.__version__}", "device": str(mx.default_device()), "load_seconds": loaded}
    return run, text["vocab_size"], about


def main() -> None:
    """Entry point."""
    request = json.load(sys.stdin)
    context = max(prompt + steps + 1 for prompt, steps in request["shapes"])
    if request["engine"] == "lily":
        run, vocab, about = lily_runner(request["model"], request["device"], context)
    else:
        run, vocab, about = mlx_runner(request["model"])
    results = []
    for prompt, steps in request["shapes"]:
        ids = prompt_ids(prompt, vocab)
        _, _, warm = run(ids, steps)
        prefill, decode, out = run(ids, steps)
        if out != warm:
            raise SystemExit(f"at {prompt} tokens the measured run chose other ids than the warm-up")
        results.append({"prompt": prompt, "steps": steps, "prefill_seconds": prefill, "decode_seconds": decode, "digest": digest(out)})
    unit = 1 if sys.platform == "darwin" else 1024
    about["peak_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    json.dump({"about": about, "results": results}, sys.stdout)


if __name__ == "__main__":
    main()
