"""What a kernel source declares: kernels with their parameters, helpers, structs, constants, instantiations."""

from __future__ import annotations

from dataclasses import dataclass, field

from lily.msl.source import Unit
from lily.msl.tokens import Token, closing, closing_angle, plain, split_commas

SPACES = ("device", "constant", "threadgroup", "thread")
BUILTINS = (
    "thread_position_in_grid",
    "thread_position_in_threadgroup",
    "threadgroup_position_in_grid",
    "thread_index_in_threadgroup",
    "thread_index_in_simdgroup",
    "simdgroup_index_in_threadgroup",
    "threads_per_threadgroup",
    "threadgroups_per_grid",
    "threads_per_grid",
    "simdgroups_per_threadgroup",
    "threads_per_simdgroup",
)


@dataclass
class Parameter:
    """`attribute` is "buffer" or a builtin, "" when it has none; `index` of a buffer; `writable`: its pointee is not const."""

    name: str
    type: str
    attribute: str
    index: int
    writable: bool
    tokens: list[Token]
    attributes: list[list[Token]]

    @property
    def space(self) -> str:
        return next((t.text for t in self.tokens if t.text in SPACES), "")


@dataclass
class Declaration:
    """`kind`: kernel, function, struct, table, function_constant, instantiation, variable or other. `body` holds the tokens in braces."""

    kind: str
    name: str
    head: list[Token]
    body: list[Token] = field(default_factory=list)
    template: list[Token] = field(default_factory=list)
    parameters: list[Parameter] = field(default_factory=list)
    children: list[Declaration] = field(default_factory=list)
    index: int = -1
    type: str = ""
    host_name: str = ""
    arguments: str = ""
    first: Token | None = None
    last: Token | None = None

    @property
    def line(self) -> int:
        return self.first.line if self.first else 0

    @property
    def file(self) -> str:
        return self.first.file if self.first else ""


def significant(unit: Unit) -> list[Token]:
    """The tokens of the language itself: no directives, no line marks."""
    return [t for t in unit.tokens if t.kind not in ("directive", "line", "blank")]


def declarations(tokens: list[Token]) -> list[Declaration]:
    """The declarations of a namespace or of a struct's body, in order."""
    found, at = [], 0
    while at < len(tokens):
        if tokens[at].text in (";", "public", "private", ":"):
            at += 1
            continue
        declaration, at = _declaration(tokens, at)
        found.append(declaration)
    return found


def functions(found: list[Declaration], scope: str = "") -> list[tuple[str, Declaration]]:
    """Kernels, helpers and the functions of structs, by qualified name."""
    out = []
    for d in found:
        if d.kind in ("kernel", "function"):
            out.append((scope + d.name, d))
        elif d.kind == "struct":
            out += functions(d.children, f"{scope}{d.name}::")
        elif d.kind == "namespace":
            out += functions(d.children, scope)
    return out


def flat(found: list[Declaration]) -> list[Declaration]:
    """Every declaration of namespace scope, namespaces opened."""
    return [x for d in found for x in (flat(d.children) if d.kind == "namespace" else [d])]


def _declaration(tokens: list[Token], start: int) -> tuple[Declaration, int]:
    at, template = start, []
    while at < len(tokens) and tokens[at].text == "template":
        end = closing_angle(tokens, at + 1) if at + 1 < len(tokens) and tokens[at + 1].text == "<" else -1
        if end < 0:
            break
        template = tokens[at : end + 1]
        at = end + 1
    if tokens[at].text == "LILY_INSTANTIATE":
        return _instantiation(tokens, at)
    head_start = at
    while at < len(tokens) and tokens[at].text not in (";", "{"):
        at = closing(tokens, at) + 1 if tokens[at].text in ("(", "[", "[[") else at + 1
    head = tokens[head_start:at]
    body: list[Token] = []
    first_names = [t.text for t in head[:3]]
    kind = _kind(head, template)
    if at < len(tokens) and tokens[at].text == "{":
        end = closing(tokens, at)
        body = tokens[at + 1 : end]
        at = end + 1
        if kind not in ("kernel", "function", "namespace"):
            while at < len(tokens) and tokens[at].text != ";":
                at += 1
            at += 1
    else:
        at += 1
        if kind in ("kernel", "function"):
            kind = "prototype"
    d = Declaration(kind, _name(kind, head), head, body, template, first=tokens[start], last=tokens[min(at, len(tokens)) - 1])
    if kind in ("kernel", "function", "prototype"):
        d.parameters = _parameters(head)
    elif kind == "struct" and first_names[:1] != ["enum"]:
        d.children = declarations(body)
    elif kind == "namespace":
        d.children = declarations(body)
    elif kind == "function_constant":
        _function_constant(d)
    return d, at


def _kind(head: list[Token], template: list[Token]) -> str:
    words = [t.text for t in head]
    if not words:
        return "other"
    if "kernel" in words[: words.index("(") if "(" in words else None]:
        return "kernel"
    if words[0] in ("using", "static_assert", "friend", "extern"):
        return "other"
    if words[0] == "namespace":
        return "namespace"
    if words[0] in ("struct", "class", "union", "enum") or words[0] == "typedef":
        return "struct" if "struct" in words[:2] or "union" in words[:2] or words[0] in ("class", "enum") else "other"
    if "function_constant" in words:
        return "function_constant"
    before = words[: words.index("=")] if "=" in words else words
    if "(" in before and "operator" not in words:
        return "function"
    if "operator" in words:
        return "function"
    return "table" if "constant" in words else "variable"


def _name(kind: str, head: list[Token]) -> str:
    names = [t for t in head if t.kind == "name"]
    if kind in ("kernel", "function", "prototype"):
        for i, t in enumerate(head):
            if t.text == "operator":
                return "operator" + "".join(x.text for x in head[i + 1 : i + 3] if x.text != "(")
            if t.text == "(" and i:
                return head[i - 1].text
    if kind == "struct":
        after = [t.text for t in head if t.kind == "name" and t.text not in ("typedef", "struct", "class", "union", "enum")]
        return after[0] if after else ""
    if kind in ("table", "variable", "function_constant"):
        for i, t in enumerate(head):
            if t.text in ("[", "=", "[[") and i:
                return head[i - 1].text
    return names[-1].text if names else ""


def _parameters(head: list[Token]) -> list[Parameter]:
    start = next((i for i, t in enumerate(head) if t.text == "("), len(head))
    parts = split_commas(head[start + 1 : closing(head, start)]) if start < len(head) else []
    return [_parameter(p) for p in parts if [t.text for t in p] != ["void"]]


def _parameter(part: list[Token]) -> Parameter:
    core, attributes, i = [], [], 0
    while i < len(part):
        if part[i].text == "[[":
            end = closing(part, i)
            attributes.append(part[i + 1 : end])
            i = end + 1
        else:
            core.append(part[i])
            i += 1
    attribute, index = "", -1
    if attributes and attributes[0]:
        inner = attributes[0]
        attribute = inner[0].text
        if len(inner) == 4 and inner[2].kind == "number" and inner[2].text.isdigit():
            index = int(inner[2].text)
    words = [t.text for t in core]
    name = next((t.text for t in reversed(core) if t.kind == "name"), "")
    pointee = words[: max((i for i, w in enumerate(words) if w in "*&"), default=0)]
    writable = bool(pointee) and "const" not in pointee and "constant" not in pointee
    kept = core[:-1] if core and core[-1].text == name else core
    return Parameter(name, plain(kept).strip(), attribute, index, writable, core, attributes)


def _function_constant(d: Declaration) -> None:
    words = [t.text for t in d.head]
    at = words.index("[[") if "[[" in words else len(words)
    d.name = words[at - 1]
    d.type = " ".join(w for w in words[: at - 1] if w not in ("constant", "const"))
    number = words.index("function_constant") + 2
    d.index = int(words[number]) if number < len(words) and words[number].isdigit() else -1


def _instantiation(tokens: list[Token], at: int) -> tuple[Declaration, int]:
    open_at = at + 1
    end = closing(tokens, open_at) if open_at < len(tokens) and tokens[open_at].text == "(" else at
    parts = split_commas(tokens[open_at + 1 : end])
    last = min(end, len(tokens) - 1)
    d = Declaration("instantiation", "", tokens[at : last + 1], first=tokens[at], last=tokens[last])
    if len(parts) >= 2:
        d.host_name = plain(parts[0]).strip()
        d.name = plain(parts[1]).strip()
        d.arguments = ", ".join(plain(p).strip() for p in parts[2:])
    at = last + 1
    if at < len(tokens) and tokens[at].text == ";":
        d.last = tokens[at]
        at += 1
    return d, at
