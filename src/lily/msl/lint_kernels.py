"""Checks of kernels' parameters, of constants and of what is published."""

from __future__ import annotations

from lily.msl.lint_tokens import is_vec3
from lily.msl.rewrite import threadgroup_variables
from lily.msl.source import Finding
from lily.msl.structure import BUILTINS, Declaration, flat, functions
from lily.msl.tokens import plain

MAX_BUFFER_INDEX = 30
_CONSTANT_TYPES = ("bool", "uint", "int", "float")


def check(found: list[Declaration]) -> list[Finding]:
    out: list[Finding] = []
    everything = flat(found)
    kernels = [d for d in everything if d.kind == "kernel"]
    for kernel in kernels:
        out += _kernel(kernel)
    out += _published(everything, kernels)
    out += _constants(everything)
    for name, d in functions(found):
        out += _threadgroup(name, d)
    return out


def _at(d: Declaration, rule: str, text: str) -> Finding:
    return Finding(d.file, d.line, rule, text)


def _kernel(kernel: Declaration) -> list[Finding]:
    out = []
    words = [t.text for t in kernel.head]
    if words[:2] != ["kernel", "void"]:
        out.append(
            _at(kernel, "kernel-form", f"{kernel.name} must read `kernel void {kernel.name}(`, with a template header before it or none")
        )
    seen: dict[tuple[str, int], str] = {}
    for p in kernel.parameters:
        token = p.tokens[-1]
        where = (token.file, token.line)
        if not p.attributes:
            out.append(Finding(*where, "attribute-missing", f"parameter {p.name} of {kernel.name} has no [[attribute]]"))
            continue
        if len(p.attributes) > 1:
            out.append(Finding(*where, "attribute-duplicate", f"parameter {p.name} of {kernel.name} has {len(p.attributes)} attributes"))
        if p.attribute not in ("buffer", *BUILTINS):
            continue  # said for its token
        if p.attribute == "buffer" and not 0 <= p.index <= MAX_BUFFER_INDEX:
            out.append(Finding(*where, "attribute-unknown", f"[[buffer]] of {p.name} needs a literal index from 0 to {MAX_BUFFER_INDEX}"))
            continue
        key = (p.attribute, p.index)
        if key in seen:
            shown = f"buffer({p.index})" if p.attribute == "buffer" else p.attribute
            out.append(Finding(*where, "attribute-duplicate", f"[[{shown}]] stands on {seen[key]} and on {p.name} of {kernel.name}"))
        seen[key] = p.name
        out += _parameter(kernel, p, where)
    return out


def _parameter(kernel, p, where) -> list[Finding]:
    if p.attribute == "buffer":
        if p.space not in ("device", "constant") or not any(t.text in "*&" for t in p.tokens):
            return [Finding(*where, "address-space", f"buffer {p.name} of {kernel.name} must be a device or constant pointer or reference")]
        bad = next((t.text for t in p.tokens if is_vec3(t.text)), None)
        if bad:
            return [Finding(*where, "vec3", f"buffer {p.name} of {kernel.name} holds {bad}, which takes 16 bytes; use scalars")]
        return []
    if p.type not in ("uint", "uint2", "uint3"):
        return [Finding(*where, "attribute-unknown", f"{p.attribute} of {kernel.name} is a {p.type}, expected uint, uint2 or uint3")]
    return []


def _published(everything: list[Declaration], kernels: list[Declaration]) -> list[Finding]:
    out = []
    names = {k.name: k for k in kernels}
    for i, k in enumerate(kernels):
        if any(o.name == k.name for o in kernels[:i]):
            out.append(_at(k, "kernel-form", f"a second kernel is called {k.name}"))
    hosts: dict[str, int] = {}
    used = set()
    for d in everything:
        if d.kind != "instantiation":
            continue
        kernel = names.get(d.name)
        if not d.host_name.isidentifier() or not d.name.isidentifier() or d.first.line != d.last.line:
            out.append(_at(d, "instantiate", "LILY_INSTANTIATE(host_name, function, arguments...) takes one line and two identifiers"))
            continue
        used.add(d.name)
        if kernel is None:
            out.append(_at(d, "instantiate", f"{d.name} is not a kernel of this source"))
        elif bool(kernel.template) != bool(d.arguments):
            form = "is a template and needs arguments" if kernel.template else "is no template and takes no arguments"
            out.append(_at(d, "instantiate", f"{d.name} {form}"))
        elif not kernel.template and d.host_name != d.name:
            out.append(_at(d, "instantiate", f"{d.name} is no template: its host name must be {d.name}, not {d.host_name}"))
        if d.host_name in hosts:
            out.append(_at(d, "instantiate", f"{d.host_name} is published twice, first in line {hosts[d.host_name]}"))
        hosts.setdefault(d.host_name, d.line)
    out += [_at(k, "instantiate", f"kernel {k.name} is never published") for k in kernels if k.name not in used]
    return out


def _constants(everything: list[Declaration]) -> list[Finding]:
    out = []
    by_index: dict[int, Declaration] = {}
    for d in everything:
        if d.kind == "function_constant":
            if d.type not in _CONSTANT_TYPES or d.index < 0 or "constant" not in [t.text for t in d.head]:
                out.append(
                    _at(
                        d,
                        "function-constant",
                        f"{d.name} must be `constant T name [[function_constant(i)]]` with T one of {', '.join(_CONSTANT_TYPES)}",
                    )
                )
            elif d.index in by_index:
                out.append(_at(d, "function-constant", f"{d.name} and {by_index[d.index].name} have the same index {d.index}"))
            by_index.setdefault(d.index, d)
        elif d.kind == "variable":
            out.append(_at(d, "program-scope", f"{d.name} at namespace scope must be a `constant`"))
        elif d.kind == "table" and not (d.body or any(t.text == "=" for t in d.head)):
            out.append(_at(d, "program-scope", f"constant {d.name} has no initialiser"))
        elif d.kind == "struct":
            out += _fields(d)
    return out


def _fields(struct: Declaration) -> list[Finding]:
    out = []
    for d in struct.children:
        bad = next((t for t in d.head if is_vec3(t.text)), None) if d.kind in ("variable", "table") else None
        if bad:
            out.append(Finding(bad.file, bad.line, "vec3", f"struct {struct.name} holds {bad.text}, which takes 16 bytes; use scalars"))
    return out


def _threadgroup(name: str, d: Declaration) -> list[Finding]:
    out = []
    for start, at, end, depth in threadgroup_variables(d.body):
        token = d.body[start]
        variable = d.body[at].text
        problem = ""
        if d.kind != "kernel":
            problem = f"stands in the helper {name}; declare it in the kernel and pass a pointer"
        elif depth:
            problem = "stands in a nested block; declare it at the top of the kernel"
        elif end < len(d.body) and d.body[end].text != ";":
            problem = "has an initialiser; threadgroup memory starts undefined"
        elif "," in plain(d.body[start:at]):
            problem = "has a type with a comma; give the type a name"
        elif any(t.text == "," for t in d.body[at:end]):
            problem = "declares several variables; one to a line"
        if problem:
            out.append(Finding(token.file, token.line, "threadgroup-variable", f"{variable} {problem}"))
    return out
