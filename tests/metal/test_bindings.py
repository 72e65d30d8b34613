"""Every published kernel binds the buffers that args.h states, at the same index, with the same name and access."""

import re

import pytest
from contract import contract, differences, kernel_of

from lily import msl

files = pytest.mark.parametrize("path", msl.kernel_files(), ids=lambda p: p.stem)


def published(path):
    """(host name, parameters) of every kernel that the file publishes."""
    unit = msl.describe(path)
    kernels = {k["name"]: k for k in unit["kernels"]}
    return [(i["host_name"], kernels[i["kernel"]]["parameters"]) for i in unit["instantiations"]]


@files
def test_buffers_are_those_of_the_contract(path):
    found = published(path)
    assert found
    assert [d for host_name, parameters in found for d in differences(host_name, parameters)] == []


@files
def test_arguments_and_the_mask_of_bound_buffers_have_their_places(path):
    text = (msl.kernel_root() / "include/args.h").read_text()
    structs = set(re.findall(r"\}\s*(\w+);", text))
    for _, parameters in published(path):
        for p in parameters:
            if p["attribute"] != "buffer" or p["index"] < 20:
                continue
            if p["index"] == 20:
                assert p["space"] == "constant" and p["type"].removeprefix("constant ").rstrip("&") in structs, p
            else:
                assert (p["index"], p["type"]) == (21, "constant uint&"), p


def test_no_two_kernels_have_one_name():
    names = [host_name for path in msl.kernel_files() for host_name, _ in published(path)]
    assert sorted(set(names)) == sorted(names)


def test_the_contract_lists_every_buffer():
    buffers = contract()
    assert len(buffers) >= 40
    for name, entries in buffers.items():
        indices = sorted(entries)
        assert indices == list(range(len(indices))), (name, indices)
    assert [b.name for b in buffers["moe_down"].values()][6:] == ["ssq"] + [
        f"{w}_{p}" for w in ("down", "shared_down") for p in ("codes", "scales", "biases")
    ]
    assert kernel_of("gemv_norm_4") == "gemv_norm" and kernel_of("gemv_4") == "gemv" and kernel_of("other") is None


def mistaken(**changes):
    """The parameters of a right `gemm`, with some changed: {name: {field: value}}."""
    rows = [("step", 0, False), ("x", 1, False), ("y", 2, True), ("codes", 3, False), ("scales", 4, False), ("biases", 5, False)]
    return [dict(name=n, index=i, writable=w, attribute="buffer", type="", space="device") | changes.get(n, {}) for n, i, w in rows]


def test_a_swapped_index_or_a_wrong_access_is_found():
    assert differences("gemm", mistaken()) == []
    assert len(differences("gemm", mistaken(scales={"index": 5}, biases={"index": 4}))) == 2
    assert len(differences("gemm", mistaken(x={"index": 2}, y={"index": 1}))) == 2
    assert differences("gemm", mistaken(codes={"writable": True}))
    assert differences("gemm", mistaken(y={"writable": False}))
    assert differences("gemm", mistaken(y={"index": 9}))
    assert differences("no_such_kernel", mistaken())
