"""What a kernel source becomes for each compiler."""

import re

import pytest

from lily import msl
from lily.msl.source import kernel_root
from lily.msl.tokens import tokenize

SOURCE = """// one kernel
#include <metal_stdlib>
#include "half.h"
using namespace metal;
constant uint FORMAT [[function_constant(3)]];
constant float TABLE[2] = {1.0f, 2.0f};
template <typename T, int N>
kernel void twice(device const T* x [[buffer(0)]], device float* y [[buffer(1)]],
                  constant uint& n [[buffer(20)]], uint i [[thread_position_in_grid]]) {
  threadgroup float s[N][N * 2];
  threadgroup uint count;
  threadgroup float* row = s[0];
  row[i] = FORMAT == 4 ? half_of(float(x[i])) : TABLE[0];
  y[i] = row[i] * float(count);
}
LILY_INSTANTIATE(twice_f32, twice, float, 4)
kernel void none(device float* y [[buffer(0)]]) { y[0] = 0.0f; }
LILY_INSTANTIATE(none, none);
"""
HEADER = "#pragma once\ninline float half_of(float x) { return x * 0.5f; }\n"


@pytest.fixture
def path(tmp_path):
    (tmp_path / "half.h").write_text(HEADER)
    (tmp_path / "twice.metal").write_text(SOURCE)
    return tmp_path / "twice.metal"


def lines_of(text):
    """{(file, line): text} as a compiler counts them."""
    found, file, line = {}, "", 1
    for row in text.split("\n"):
        mark = re.fullmatch(r'#line (\d+) "(.*)"', row)
        if mark:
            file, line = mark[2], int(mark[1])
        else:
            found[file, line] = row
            line += 1
    return found


@pytest.mark.parametrize("mode", msl.MODES)
def test_lines_stay_where_they_were(path, mode):
    lines = lines_of(msl.rewrite(path, mode))
    for number, text in (
        (9, "[[thread_position_in_grid]]" if mode == "apple" else "uint i"),
        (13, "half_of"),
        (14, "y[i] = row[i]"),
        (17, "y[0] = 0.0f"),
    ):
        assert text in lines["twice.metal", number]
    assert "half_of" in lines["half.h", 2]


def test_apple_gets_its_own_language_back(path):
    lines = lines_of(msl.rewrite(path, "apple"))
    source = SOURCE.split("\n")
    for number in (*range(5, 16), 17):
        assert lines["twice.metal", number].rstrip() == source[number - 1].rstrip()
    assert lines["twice.metal", 16].rstrip() == 'template [[host_name("twice_f32")]] [[kernel]] decltype(twice<float, 4>) twice<float, 4>;'
    assert lines["twice.metal", 18].strip() == ";"  # a kernel that is no template has its own name


def test_the_simulator_gets_bindings_and_macros(path):
    text = msl.rewrite(path, "sim")
    lines = lines_of(text)
    assert text.startswith("#include <metal_stdlib>\nLILY_UNIT_BEGIN\n") and text.endswith("LILY_UNIT_END\n")
    row = {number: " ".join(lines["twice.metal", number].split()) for number in range(1, 19)}
    assert row[5].replace(" ;", ";") == "LILY_FC(uint, FORMAT, 3);"
    assert row[6] == "LILY_TABLE float TABLE[2] = {1.0f, 2.0f};"
    assert (
        '{lily::bind_buffer, 1, "y", true}, {lily::bind_buffer, 20, "n", false}, {lily::bind_thread_position_in_grid, 0, "i", false}'
        in row[7]
    )
    assert row[7].startswith("struct twice_bindings {") and row[7].endswith("template <typename T, int N>")
    assert row[8] == "LILY_KERNEL_FUNCTION void twice( const T* x , float* y ,"
    assert row[9] == "const uint& n , uint i ) {"
    assert row[10].replace(" ;", ";") == "LILY_TG((float), s, [N][N * 2]);"
    assert row[11].replace(" ;", ";") == "LILY_TG((uint), count, );"
    assert row[12] == "float* row = s[0];"
    assert row[16] == 'LILY_REGISTER(twice_f32, twice_bindings, "twice.metal", 16, twice<float, 4>);'


def test_cuda_helpers_are_device_functions(path):
    assert "LILY_INLINE float half_of(float x)" in msl.rewrite(path, "cuda")


def test_the_storage_of_activations_is_a_macro(path):
    assert msl.rewrite(path, "apple", storage="float32").startswith("#define LILY_STORAGE_FLOAT32 1\n")
    assert "LILY_STORAGE_FLOAT32" not in msl.rewrite(path, "apple")
    with pytest.raises(ValueError, match="storage is 'half', expected bfloat16 or float32"):
        msl.rewrite(path, "apple", storage="half")
    with pytest.raises(ValueError, match="mode is 'metal', expected one of apple, strict, sim, cuda"):
        msl.rewrite(path, "metal")


def test_a_description_lists_kernels_parameters_and_instantiations(path):
    unit = msl.describe(path)
    assert unit["constants"] == [{"name": "FORMAT", "type": "uint", "index": 3}]
    assert [(i["host_name"], i["kernel"], i["arguments"]) for i in unit["instantiations"]] == [
        ("twice_f32", "twice", "float, 4"),
        ("none", "none", ""),
    ]
    parameters = unit["kernels"][0]["parameters"]
    assert [(p["name"], p["attribute"], p["index"], p["writable"], p["space"]) for p in parameters] == [
        ("x", "buffer", 0, False, "device"),
        ("y", "buffer", 1, True, "device"),
        ("n", "buffer", 20, False, "constant"),
        ("i", "thread_position_in_grid", -1, False, ""),
    ]


def test_tokens_give_the_text_back():
    for path in [*msl.kernel_files(), *kernel_root().glob("include/*.h")]:
        text = path.read_text()
        tokens, rest = tokenize(text, path.name)
        assert "".join(t.space + t.text for t in tokens) + rest == text


def test_a_header_is_included_once(tmp_path, path):
    (tmp_path / "both.metal").write_text('#include "half.h"\n#include "half.h"\n' + SOURCE.split("\n", 3)[3])
    assert msl.rewrite(tmp_path / "both.metal", "sim").count("x * 0.5f") == 1
