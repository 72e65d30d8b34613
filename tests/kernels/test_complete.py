"""A kernel without a reference fails here."""

from importlib import import_module
from pathlib import Path

import pytest

from lily import _native

HERE = Path(__file__).parent
#: The decode form of a kernel that is compared with the reference of its prefill form, for one row.
ONE_ROW_OF = {"attn_prepare": "attn_prepare_rows"}


@pytest.mark.parametrize("kernel", sorted({*_native.testing.kernels(), *_native.testing.launch_kernels()}))
def test_every_kernel_has_a_float64_reference_and_a_test_that_runs_it(kernel):
    modules = [import_module(path.stem) for path in HERE.glob("reference_*.py")]
    assert any(callable(getattr(module, ONE_ROW_OF.get(kernel, kernel), None)) for module in modules)
    assert any(f'"{kernel}"' in path.read_text() for path in HERE.glob("test_*.py") if path.name != Path(__file__).name)
