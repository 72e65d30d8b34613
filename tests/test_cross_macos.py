"""The gate for arm64 macOS, which has no Mac: a foreign symbol and a message that Apple's headers do not know are reported by name."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / ".ci/cross_macos"
if not FOLDER.is_dir():
    pytest.skip("the gate is part of a checkout, not of the source distribution", allow_module_level=True)


def load(name):
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


check, prove = load("check"), load("prove_messages")

HOMES = {check.SYSTEM: {"_malloc"}, check.OBJC: {"_objc_msgSend"}, check.PYTHON: {"_PyList_New"}}
GOOD = {"_malloc": check.SYSTEM, "_objc_msgSend": check.OBJC, "_PyList_New": check.PYTHON}
EXPORTED = ["_PyInit__native", "___dso_handle", "__Znwm"]


def test_symbols_with_a_known_home_pass():
    assert check.problems(GOOD, EXPORTED, (14, 0), HOMES) == []


@pytest.mark.parametrize(
    ("symbol", "home", "said"),
    [
        ("_cudaMalloc", check.PYTHON, "_cudaMalloc has no known home: no library that the extension is linked with has it"),
        (
            "_posix_fallocate",
            check.SYSTEM,
            "_posix_fallocate has no known home: /usr/lib/libSystem.B.dylib that the extension is linked with has it",
        ),
        ("_malloc", check.PYTHON, "_malloc has no known home"),
        ("_deflate", "/usr/lib/libz.1.dylib", "_deflate is taken from /usr/lib/libz.1.dylib, which is no known home"),
    ],
)
def test_a_foreign_symbol_is_named(symbol, home, said):
    (found,) = check.problems(GOOD | {symbol: home}, EXPORTED, (14, 0), HOMES)
    assert found.startswith(said)


def test_what_is_exported_and_the_oldest_macos_are_checked():
    assert check.problems(GOOD, ["_lily_extra"], (15, 2), HOMES) == [
        "_PyInit__native is not exported", "_lily_extra is exported", "it needs macOS 15.2",
    ]  # fmt: skip


def test_a_linked_file_with_a_foreign_symbol_is_refused(tmp_path, monkeypatch):
    """A real one: three functions, of libSystem, of Python and of nobody."""
    pytest.importorskip("lief", reason="lief is not installed: .ci/cross_macos/run installs it")
    ziglang = pytest.importorskip("ziglang", reason="ziglang is not installed: .ci/cross_macos/run installs it")
    monkeypatch.setenv("LILY_ZIG", str(Path(ziglang.__file__).with_name("zig")))
    source, target = tmp_path / "a.c", tmp_path / "a.so"
    source.write_text(
        "void *malloc(unsigned long); void *PyList_New(long); int nobody_has_this(void);\n"
        "void *PyInit__native(void) { return nobody_has_this() ? malloc(1) : PyList_New(0); }\n"
    )
    command = [FOLDER / "zig-c++", "-x", "c", "-bundle", "-Wl,@darwin-ld-cpython.sym", "-nostdlib++", source, "-o", target]
    monkeypatch.chdir(tmp_path)
    subprocess.run(command, check=True)
    taken, exported, oldest = check.read(target)
    assert taken["_malloc"] == check.SYSTEM and taken["_PyList_New"] == taken["_nobody_has_this"] == check.PYTHON
    assert check.problems(taken, exported, oldest, check.known_homes()) == [
        "_nobody_has_this has no known home: no library that the extension is linked with has it"
    ]


def test_a_function_that_macos_14_lacks_does_not_compile(tmp_path, monkeypatch):
    ziglang = pytest.importorskip("ziglang", reason="ziglang is not installed: .ci/cross_macos/run installs it")
    monkeypatch.setenv("LILY_ZIG", str(Path(ziglang.__file__).with_name("zig")))
    source = tmp_path / "a.cpp"
    compiled = []
    for function in ("__fabsf16", "fabsf"):  # since macOS 15, and ever since
        source.write_text(f"#include <math.h>\nfloat f(float x) {{ return float({function}(x)); }}\n")
        compiled.append(subprocess.run([FOLDER / "zig-c++", "-c", source, "-o", tmp_path / "a.o"], capture_output=True, text=True))
    assert "'__fabsf16' is only available on macOS 15.0 or newer" in compiled[0].stderr
    assert [run.returncode == 0 for run in compiled] == [False, True]


@pytest.fixture(scope="module")
def metal_cpp():
    pytest.importorskip("ziglang", reason="ziglang is not installed: .ci/cross_macos/run installs it")
    folder = os.environ.get("LILY_METAL_CPP")
    if not folder:
        pytest.skip("LILY_METAL_CPP does not name metal-cpp's headers, of the wheel mlx-metal: .ci/cross_macos/run unpacks them")
    return Path(folder)


KINDS = "other types than in "
#: A line of a list, and what is said of it.
MISTAKES = {
    'LILY_MESSAGE(MTLDevice, misspelt, "newBufferWithLenght:options:", Object, (uint64_t length, uint64_t options))':
        "metal-cpp registers no such selector",
    'LILY_MESSAGE(MTLDevice, of_another_class, "endEncoding", void, ())': "metal-cpp does not send it to such an object",
    'LILY_MESSAGE(MTLGadget, no_such_class, "name", Object, ())': "metal-cpp knows no such class or protocol",
    'LILY_CLASS_MESSAGE(MTLDevice, to_the_class, "name", Object, ())': "metal-cpp does not send it to the class",
    'LILY_MESSAGE(MTLCompileOptions, to_an_object, "alloc", Object, ())': "metal-cpp does not send it to such an object",
    'LILY_MESSAGE(MTLDevice, without_a_parameter, "newBufferWithLength:options:", Object, (uint64_t length))':
        "another number of arguments than in MTL::Buffer* MTL::Device::newBuffer(NS::UInteger length, MTL::ResourceOptions options)",
    'LILY_MESSAGE(MTLDevice, floating_length, "newBufferWithLength:options:", Object, (double length, uint64_t options))':
        KINDS + "MTL::Buffer* MTL::Device::newBuffer(NS::UInteger length, MTL::ResourceOptions options)",
    'LILY_MESSAGE(MTLDevice, plain_pointer, "newBufferWithLength:options:", void*, (uint64_t length, uint64_t options))':
        KINDS + "MTL::Buffer* MTL::Device::newBuffer(NS::UInteger length, MTL::ResourceOptions options)",
    'LILY_MESSAGE(MTLDevice, other_sign, "supportsFamily:", bool, (uint64_t family))':
        KINDS + "bool MTL::Device::supportsFamily(MTL::GPUFamily gpuFamily)",
    'LILY_MESSAGE(MTLDevice, wide_bool, "hasUnifiedMemory", uint64_t, ())': KINDS + "bool MTL::Device::hasUnifiedMemory()",
    'LILY_MESSAGE(MTLBuffer, number_for_pointer, "contents", uint64_t, ())': KINDS + "void* MTL::Buffer::contents()",
    'LILY_MESSAGE(MTLCommandBuffer, single_time, "GPUEndTime", float, ())': KINDS + "CFTimeInterval MTL::CommandBuffer::GPUEndTime()",
    'LILY_MESSAGE(MTLDevice, error_by_value, "newLibraryWithSource:options:error:", Object, (Object source, Object options, Object error))':
        KINDS + "MTL::Library* MTL::Device::newLibrary(const NS::String* source, const MTL::CompileOptions* options, NS::Error** error)",
    'LILY_MESSAGE(MTLComputeCommandEncoder, size_as_object, "dispatchThreadgroups:threadsPerThreadgroup:", void, (Object g, MtlSize t))':
        KINDS + "void MTL::ComputeCommandEncoder::dispatchThreadgroups(MTL::Size threadgroupsPerGrid, MTL::Size threadsPerThreadgroup)",
}  # fmt: skip


def test_every_mistake_in_a_list_of_messages_is_found(metal_cpp, tmp_path):
    path = tmp_path / "messages.inc"
    path.write_text("\n".join([*MISTAKES, 'LILY_MESSAGE(MTLDevice, right, "name", Object, ())']) + "\n")
    wanted = {f"{m.owner} {m.selector}: {said}" for m, said in zip(prove.messages(path.read_text()), MISTAKES.values(), strict=False)}
    assert set(prove.problems(prove.Headers(metal_cpp), metal_cpp, path)) == wanted


def test_a_line_that_is_no_message_and_a_name_given_twice_are_refused(metal_cpp, tmp_path):
    path = tmp_path / "messages.inc"
    path.write_text('LILY_MESSAGE(MTLDevice, name, "name", Object)\n')
    with pytest.raises(ValueError, match="line 1 is no message"):
        prove.problems(prove.Headers(metal_cpp), metal_cpp, path)
    path.write_text('LILY_MESSAGE(MTLDevice, same, "name", Object, ())\n' * 2)
    assert prove.problems(prove.Headers(metal_cpp), metal_cpp, path) == ["MTLDevice name: two messages have this name"]


def test_the_list_of_the_device_is_proven(metal_cpp):
    assert len(prove.messages(prove.LIST.read_text())) > 40
    assert prove.problems(prove.Headers(metal_cpp), metal_cpp) == []
