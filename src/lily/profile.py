"""`Model.profile`: where the time of a prompt and of a decode step goes, kernel by kernel."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from lily._engine import native
from lily.errors import ContextOverflowError
from lily.sampling import Sampling

if TYPE_CHECKING:
    from lily.model import Model
    from lily.prompts import Prompt

_PHASES = {"decode": "decode", "sampler": "decode", "head_step": "decode", "prefill": "prefill", "head_rows": "prefill"}


@dataclass(frozen=True)
class DispatchTime:
    """One dispatch of a program. `seconds` is the mean of its stage's time; dispatches that share a stage share it by their bytes.

    `times` is how often it ran: in the whole prompt, or in a decode step (below 1 when a growing context changed the program).
    """

    phase: str
    program: str
    kernel: str
    label: str
    stage: int
    times: float
    nbytes: int
    seconds: float


@dataclass(frozen=True)
class KernelTime:
    """All dispatches of one kernel in one decode step, or in the whole prompt."""

    kernel: str
    dispatches: int
    nbytes: int
    seconds: float

    @property
    def bytes_per_second(self) -> float:
        """Bytes that the plan counts for them over the time they took."""
        return self.nbytes / self.seconds if self.seconds > 0 else 0.0


@dataclass(frozen=True)
class Profile:
    """Times of one prompt and of the decode steps after it. `str` is a table; `plot` draws it.

    `decode_seconds` is the mean wall time of a step, `prefill_seconds` that of the prompt up to the first id; `read_rate` is bytes a second that the
    CPU was measured to read at best from a working set of one step, right after the run (None where the device is no CPU).

    >>> import lily
    >>> profile = lily.Model.demo().profile("Once upon a time", steps=4)
    >>> profile.decode_stages <= profile.decode_dispatches
    True
    """

    source: str
    device: str
    prompt_tokens: int
    steps: int
    prefill_seconds: float
    decode_seconds: float
    read_rate: float | None
    dispatches: tuple[DispatchTime, ...]

    @property
    def decode_dispatches(self) -> int:
        """Dispatches of one decode step."""
        return round(sum(d.times for d in self.dispatches if d.phase == "decode"))

    @property
    def decode_stages(self) -> int:
        """Stages of one decode step."""
        return round(sum({(d.program, d.stage): d.times for d in self.dispatches if d.phase == "decode"}.values()))

    def seconds(self, phase: str) -> float:
        """Time within stages: of one decode step ("decode") or of the whole prompt ("prefill")."""
        return sum(kernel.seconds for kernel in self.kernels(phase))

    def kernels(self, phase: str) -> list[KernelTime]:
        """One entry for each kernel of a phase, "decode" (one step) or "prefill" (the whole prompt), the slowest first."""
        if phase not in ("decode", "prefill"):
            raise ValueError(f"phase is {phase!r}, expected decode or prefill")
        found: dict[str, list[DispatchTime]] = {}
        for dispatch in self.dispatches:
            if dispatch.phase == phase:
                found.setdefault(dispatch.kernel, []).append(dispatch)
        kernels = [
            KernelTime(
                name, round(sum(d.times for d in own)), round(sum(d.nbytes * d.times for d in own)), sum(d.seconds * d.times for d in own)
            )
            for name, own in found.items()
        ]
        return sorted(kernels, key=lambda kernel: -kernel.seconds)

    def to_dict(self) -> dict[str, Any]:
        """Everything, as JSON can hold it."""
        kernels = {
            phase: [asdict(k) | {"bytes_per_second": k.bytes_per_second} for k in self.kernels(phase)] for phase in ("prefill", "decode")
        }
        return asdict(self) | {"kernels": kernels, "decode_stages": self.decode_stages, "decode_dispatches": self.decode_dispatches}

    def __str__(self) -> str:
        lines = [f"{self.source} on {self.device}"]
        if self.read_rate is not None:
            lines.append(f"memory read at {self.read_rate / 1e9:.1f} GB/s from a working set of one step")
        for phase, wall in (("prefill", self.prefill_seconds), ("decode", self.decode_seconds)):
            lines += [
                "",
                self._title(phase, wall),
                f"{'kernel':<36}{'dispatches':>11}{'ms':>10}{'share':>8}{'MB':>10}{'GB/s':>8}{'of read':>9}",
            ]
            total = self.seconds(phase)
            lines += [self._line(kernel, total) for kernel in self.kernels(phase)]
        return "\n".join(lines)

    def _title(self, phase: str, wall: float) -> str:
        inside = self.seconds(phase)
        rest = f"{inside * 1e3:.2f} ms in stages, {max(wall - inside, 0) * 1e3:.2f} ms between and around them"
        if phase == "prefill":
            return f"prefill of {self.prompt_tokens} tokens: {wall * 1e3:.2f} ms, {rest}"
        return f"decode, the mean of {self.steps} steps: {wall * 1e3:.2f} ms, {rest}; {self.decode_dispatches} dispatches in {self.decode_stages} stages"

    def _line(self, kernel: KernelTime, total: float) -> str:
        share = "" if self.read_rate is None else f"{kernel.bytes_per_second / self.read_rate:.0%}"
        return (
            f"{kernel.kernel:<36}{kernel.dispatches:>11}{kernel.seconds * 1e3:>10.3f}{kernel.seconds / total:>8.1%}"
            f"{kernel.nbytes / 1e6:>10.2f}{kernel.bytes_per_second / 1e9:>8.2f}{share:>9}"
        )

    def plot(self) -> Any:
        """A matplotlib figure: time by kernel, prefill and decode. Raises `ImportError` without matplotlib (extra `bench`)."""
        from lily.bench.report import new_figure

        figure, axes = new_figure(2, width=12, height=5)
        if figure is None:
            raise ImportError("plots need matplotlib: pip install 'lily-inference[bench]'")
        for axis, phase in zip(axes, ("prefill", "decode"), strict=True):
            kernels = self.kernels(phase)[::-1]
            axis.barh([kernel.kernel for kernel in kernels], [kernel.seconds * 1e3 for kernel in kernels])
            axis.set_xlabel("ms")
            axis.set_title(f"{phase}, {self.prompt_tokens} tokens" if phase == "prefill" else "one decode step")
        return figure

    def _repr_html_(self) -> str:
        import html

        return f"<pre>{html.escape(str(self))}</pre>"


class ProfileMethods:
    """`profile`, for `Model`."""

    def profile(self, prompt: Prompt, *, steps: int = 32) -> Profile:
        """Read `prompt` and generate `steps` tokens greedily, twice, and time every stage of the second run.

        Times are of the programs as they always run; the clock costs less than a microsecond a stage. On a GPU they are the GPU's own, and each stage
        is a command buffer by itself: its start is in its time. Other requests that run meanwhile are counted too. Raises `ValueError` for fewer than one step, `ContextOverflowError`, and `DeviceError` on a device that does not time
        its stages.

        >>> import lily
        >>> profile = lily.Model.demo().profile("Once upon a time", steps=4)
        >>> profile.kernels("decode")[0].seconds > 0
        True
        """
        return profile(self, prompt, steps)  # type: ignore[arg-type]


def profile(model: Model, prompt: Prompt, steps: int) -> Profile:
    """See `Model.profile`."""
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise ValueError(f"steps is {steps!r}, expected a positive integer")
    ids = model._ids(prompt)
    if len(ids) + steps + 1 > model.max_context:
        raise ContextOverflowError(
            f"{len(ids)} tokens and {steps + 1} generated ones do not fit in a context of {model.max_context}",
            tokens=len(ids) + steps + 1, limit=model.max_context,
        )  # fmt: skip
    sampling = Sampling.greedy().resolved().to_dict() | {"logprobs": -1, "masked": False}
    _run(model, ids, steps, sampling)
    native().start_clock(model._native)
    try:
        prefill_seconds, step_seconds = _run(model, ids, steps, sampling)
    finally:
        timed = native().stop_clock(model._native)
    # A program does not know how many keys and values it will read: in the mean those of the tokens before it.
    kv_bytes = (len(ids) + (steps + 1) / 2) * model.memory().kv_bytes_per_token
    dispatches = tuple(dispatch for program in timed for dispatch in _dispatches(program, _times(program, timed), kv_bytes))
    nbytes = round(sum(d.nbytes * d.times for d in dispatches if d.phase == "decode"))
    return Profile(
        source=model.source,
        device=str(model.device),
        prompt_tokens=len(ids),
        steps=steps,
        prefill_seconds=prefill_seconds,
        decode_seconds=float(np.mean(step_seconds)),
        read_rate=_read_rate(nbytes) if model.device.kind == "cpu" else None,
        dispatches=dispatches,
    )


def _run(model: Model, ids: Any, steps: int, sampling: dict[str, Any]) -> tuple[float, list[float]]:
    """Seconds until the first id, and of each step after it."""
    session = model._native.session()
    try:
        clock = [time.perf_counter()]
        session.append(ids)
        decoder = session.start(sampling, steps + 1)
        try:
            while decoder.next() is not None:
                clock.append(time.perf_counter())
        finally:
            decoder.close()
    finally:
        session.close()
    first, *rest = np.diff(clock).tolist()
    return first, rest or [0.0]


def _times(program: dict[str, Any], timed: list[dict[str, Any]]) -> float:
    """How often a program ran in the prompt, or in a decode step."""

    def runs(one: dict[str, Any]) -> int:
        return len(one["seconds"]) // (1 + max(entry["stage"] for entry in one["dispatches"]))

    if _PHASES[program["kind"]] == "prefill":
        return runs(program)
    return runs(program) / sum(runs(one) for one in timed if one["kind"] == program["kind"])


def _dispatches(program: dict[str, Any], times: float, kv_bytes: float) -> list[DispatchTime]:
    """`kv_bytes`: of the keys and values of all layers that a decode step reads."""
    listed = program["dispatches"]
    readers = [entry for entry in listed if entry["kernel"].startswith("attn_split")]
    for entry in readers:
        entry["bytes_read"] += round(kv_bytes / len(readers))
    stages = 1 + max(entry["stage"] for entry in listed)
    seconds = program["seconds"].reshape(-1, stages)
    middle = seconds.mean(axis=0)
    stage_bytes = np.zeros(stages)
    for entry in listed:
        stage_bytes[entry["stage"]] += max(entry["bytes_read"] + entry["bytes_written"], 1)
    found = []
    for entry in listed:
        nbytes = entry["bytes_read"] + entry["bytes_written"]
        part = max(nbytes, 1) / stage_bytes[entry["stage"]]
        name = f"{program['kind']}/{program['rows']}"
        found.append(
            DispatchTime(
                _PHASES[program["kind"]],
                name,
                entry["kernel"],
                entry["label"],
                entry["stage"],
                times,
                nbytes,
                float(middle[entry["stage"]] * part),
            )  # fmt: skip
        )
    return found


def _read_rate(nbytes: int) -> float:
    from lily.bench import limits

    return limits.measure("read", nbytes=nbytes, windows=5, seconds=0.05).best
