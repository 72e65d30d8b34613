"""Every case of every family, in the order in which they run."""

from __future__ import annotations

from lily.selftest import attention, gdn, linear, moe, rows, sampling
from lily.selftest.case import Spec


def specs() -> list[Spec]:
    """Sorted by kernel, the small shapes of a kernel before the real ones."""
    found = [spec for family in (rows, linear, moe, gdn, attention, sampling) for spec in family.specs()]
    order = {kernel: at for at, kernel in enumerate(dict.fromkeys(spec.kernel for spec in found))}
    return sorted(found, key=lambda spec: (order[spec.kernel], spec.real))
