"""Runs the cases on a device, one row after the other; what fails or raises fails its row, and the next one runs."""

from __future__ import annotations

import fnmatch
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from lily._engine import native
from lily.device import devices
from lily.errors import DeviceError, GPUError
from lily.selftest import catalogue, model
from lily.selftest.case import Case, Form, Launch, Spec
from lily.selftest.device import NoAnswerError, OpenDevice, Outcome, Variants, may_lack_tensor, user_kernels
from lily.selftest.measure import Error, differing

if TYPE_CHECKING:
    Array = np.ndarray[Any, Any]

SLOW_ON_SIM = "shapes of the 35B model that take minutes on the simulator; --full runs them"
REAL_IN_QUICK = "shapes of the 35B model, by --quick"
PASSED, FAILED, LEFT_OUT = "passed", "failed", "left out"


@dataclass(frozen=True)
class Row:
    """One line of the report. `text` says why it failed, or why it was left out."""

    kernel: str
    shape: str
    form: str = ""
    status: str = PASSED
    error: Error | None = None
    seconds: float | None = None
    bytes: int = 0
    text: str = ""

    @property
    def name(self) -> str:
        return f"{self.kernel} {self.shape}" + (f", {self.form}" if self.form else "")

    @property
    def rate(self) -> float | None:
        """Gigabytes a second of what has to move."""
        return self.bytes / self.seconds / 1e9 if self.seconds else None


@dataclass(frozen=True)
class Options:
    """`quick`: small shapes alone; `full`: the large ones on the simulator too; `kernels`: names or patterns, none for all."""

    quick: bool = False
    full: bool = False
    kernels: Sequence[str] = ()

    def wants(self, kernel: str) -> bool:
        return not self.kernels or any(fnmatch.fnmatchcase(kernel, pattern) for pattern in self.kernels)


@dataclass
class Report:
    """What a run found so far. `kernels`: the user's LILY_KERNEL; `interrupted`: it was stopped before its end."""

    device: dict[str, Any]
    options: Options
    kernels: str = ""
    rows: list[Row] = field(default_factory=list)
    seconds: float = 0.0
    open_seconds: float = 0.0
    prepare_seconds: float = 0.0
    interrupted: bool = False

    def having(self, status: str) -> list[Row]:
        return [row for row in self.rows if row.status == status]

    @property
    def ok(self) -> bool:
        return not self.interrupted and not self.having(FAILED) and bool(self.having(PASSED))


def run(
    name: str, options: Options, say: Callable[[Row], None] = lambda row: None, started: Callable[[Report], None] = lambda report: None
) -> Report:
    """Tests the device `name`; `started` is called once it is open, `say` for each row as it is found.

    Raises `DeviceError` when the device is not there. After Ctrl-C the report holds what was done.
    """
    begin = time.perf_counter()
    device = _open(name)
    report = Report(device.info, options, kernels=device.kernels or "", open_seconds=device.open_seconds)
    started(report)
    bench = Bench(device, report)
    try:
        for row in bench.rows():
            report.rows.append(row)
            say(row)
    except KeyboardInterrupt:
        report.interrupted = True
    finally:
        bench.close()
        report.seconds = time.perf_counter() - begin
    return report


def _open(name: str) -> OpenDevice:
    known = [device.name for device in devices()]
    try:
        return OpenDevice(name, user_kernels())
    except DeviceError as error:
        if name in ("auto", *known):
            raise
        raise DeviceError(f"{error} (here are: {', '.join(known)})") from None


class Bench:
    """A device, what it is compared with, and the rows that come of it."""

    def __init__(self, device: OpenDevice, report: Report) -> None:
        self.device, self.report = device, report
        self.float32 = device.info["storage"] == "float32"
        reference = "cpu:float32" if self.float32 else "cpu"
        # The CPU's own kernels are held against the portable ones.
        self.reference = OpenDevice(reference, None if device.gpu else "*=portable")
        self.silent_since = ""  # the row in which the device gave no answer
        self.variants = Variants(str(device.info["name"]))
        self.others = [] if device.gpu else _other_instruction_sets()

    def rows(self) -> Iterator[Row]:
        options = self.report.options
        for spec in catalogue.specs():
            if options.wants(spec.kernel):
                yield from self.spec(spec)
        if options.wants(model.NAME):
            yield from self.model()

    def spec(self, spec: Spec) -> Iterator[Row]:
        reason = self._left_out(spec)
        if reason:
            yield Row(spec.kernel, spec.shape, status=LEFT_OUT, text=reason)
            return
        try:
            case = spec.build()
            if self.float32:
                case = case.in_float32()
            got = self._run(self.device, case.arrays, case.launches)
            want = self.reference.run(case.arrays, case.cpu or case.launches).arrays
            yield self._row(spec, case, "", got, _worst(case, got.arrays, want))
        except Exception as error:  # whatever it is, the other rows are still worth having
            yield self._failed(Row(spec.kernel, spec.shape, status=FAILED, text=_text(error)), error)
            return
        for form in self._forms(case):
            if self.silent_since:
                return
            yield self._form(spec, case, form, got.arrays, want)

    def _form(self, spec: Spec, case: Case, form: Form, default: dict[str, Array], want: dict[str, Array]) -> Row:
        try:
            device = self._device(form)
            found = self._run(device, case.arrays, form.launches or case.launches)
            if form.bits:
                errors = [differing(found.arrays[name], default[name]) for name in case.checks]
                return self._row(spec, case, form.name, found, max(errors, key=lambda error: error.value))
            return self._row(spec, case, form.name, found, _worst(case, found.arrays, want))
        except Exception as error:
            return self._failed(
                Row(spec.kernel, spec.shape, form.name, LEFT_OUT if self._lacks(form.name, error) else FAILED, text=_text(error)), error
            )

    def _lacks(self, form: str, error: Exception) -> bool:
        """Tensor operations are of some GPUs alone; a device that lacks them says so before anything runs."""
        said = isinstance(error, DeviceError) and not isinstance(error, GPUError)
        return form.startswith("tensor") and said and may_lack_tensor(self.report.device["description"])

    def _failed(self, row: Row, error: Exception) -> Row:
        """After a device has not answered it is asked nothing more."""
        if isinstance(error, NoAnswerError):
            self.silent_since = row.name
        return row

    def _forms(self, case: Case) -> list[Form]:
        if self.device.kernels:  # what the user forces need not have the bits of other forms
            return []
        forms = [form for form in case.forms if (self.device.gpu or not form.gpu) and not (self.float32 and form.rounded)]
        return forms + [Form(isa, variant=f"*={isa}", gpu=False) for isa in self.others]

    def _device(self, form: Form) -> OpenDevice:
        return self.device if form.variant is None else self.variants.get(form.variant)

    def _run(self, device: OpenDevice, arrays: dict[str, Array], launches: Sequence[Launch]) -> Outcome:
        real = not device.simulated  # simulated time means nothing, and the simulator reports races by itself
        found = device.run(arrays, launches, again=real, timed=real)
        self.report.prepare_seconds += found.prepare_seconds
        return found

    def _row(self, spec: Spec, case: Case, form: str, found: Outcome, error: Error) -> Row:
        text = "" if error.ok else f"{error.where}: {error}" if error.where else str(error)
        if not found.repeats:
            text = "a second run gave other bits" + (f"; {text}" if text else "")
        return Row(spec.kernel, spec.shape, form, FAILED if text else PASSED, error, found.seconds, case.moved(), text)

    def _left_out(self, spec: Spec) -> str:
        if not self.device.gpu and spec.kernel not in native().testing.kernels():
            return "a form for GPUs; on the CPU attn_split does its work"
        if spec.real and self.report.options.quick:
            return REAL_IN_QUICK
        if spec.slow and self.device.simulated and not self.report.options.full:
            return SLOW_ON_SIM
        if self.silent_since:
            return f"the device has given no answer since {self.silent_since}"
        return ""

    def model(self) -> Iterator[Row]:
        """The shipped model from prompt to text."""
        if self.silent_since:
            yield Row(model.NAME, "all", status=LEFT_OUT, text=f"the device has given no answer since {self.silent_since}")
            return
        small = self.report.options.quick or bool(self.device.kernels) or (self.device.simulated and not self.report.options.full)
        checks = model.checks(str(self.device.info["name"]), gpu=self.device.gpu, small=small)
        for check in checks:
            try:
                errors = check.run()
                worst = max(errors, key=lambda error: error.share)
                text = "; ".join(f"{error.where}: {error}" for error in errors if not error.ok)
                yield Row(model.NAME, check.what, check.form, FAILED if text else PASSED, worst, text=text)
            except Exception as error:
                yield Row(model.NAME, check.what, check.form, LEFT_OUT if self._lacks(check.form, error) else FAILED, text=_text(error))
        if small:
            why = "minutes on the simulator; --full runs them"
            if self.report.options.quick or self.device.kernels:
                why = "by --quick" if self.report.options.quick else "LILY_KERNEL forces a form"
            yield Row(model.NAME, "a long prompt, the unfused plan and every variant", status=LEFT_OUT, text=why)

    def close(self) -> None:
        self.reference.close()
        self.variants.close(wait=not self.silent_since)
        self.device.close(wait=not self.silent_since)


def _worst(case: Case, got: dict[str, Array], want: dict[str, Array]) -> Error:
    """Of all checks the one that uses most of its bound."""
    errors = [
        Error(error.value, error.bound, error.unit, name)
        for name, check in case.checks.items()
        for error in check.errors(got[name], want[name])
    ]
    return max(errors, key=lambda error: error.share)


def _other_instruction_sets() -> list[str]:
    """Of x86 all but the best and the portable one: they give the best one's bits."""
    return [name for name in native().testing.instruction_sets()[1:] if name != "portable"]


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
