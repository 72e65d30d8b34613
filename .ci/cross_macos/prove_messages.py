"""Proves the Metal device's list of Objective-C messages against Apple's metal-cpp headers, which PyPI's mlx-metal wheel carries.

python .ci/cross_macos/prove_messages.py HEADERS [LIST]        # HEADERS: mlx/include/metal_cpp of the wheel; needs the package ziglang

For each message: metal-cpp registers that selector, sends it to that class (to the class itself, if the list says so) with as many arguments,
and each argument and the result have the size and the kind that the list gives them. The last two are decided by a compiler.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
LIST = HERE.parents[1] / "csrc/device/metal/messages.inc"
COMPILER = [sys.executable, "-m", "ziglang", "c++", "-target", "aarch64-macos.14.0"]


@dataclass(frozen=True)
class Message:
    line: int
    to_class: bool
    owner: str
    name: str
    selector: str


@dataclass(frozen=True)
class Method:
    """A member function of metal-cpp that does nothing but send one message with its own arguments in order."""

    space: str
    owner: str
    name: str
    result: str
    parameters: str
    selector: str
    to_class: str | None  # the class it is sent to, where it is not sent to an object

    def __str__(self) -> str:
        return f"{self.result} {self.space}::{self.owner}::{self.name}({self.parameters})"


def messages(text: str) -> list[Message]:
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.startswith("LILY_"):
            continue
        match = re.match(r'LILY_(CLASS_)?MESSAGE\((\w+), (\w+), "([\w:]+)", .+, \(.*\)\)$', line)
        if not match:
            raise ValueError(f"line {number} is no message: {line}")
        found.append(Message(number, bool(match[1]), *match.groups()[1:]))
    return found


class Headers:
    """What metal-cpp's Foundation and Metal headers register and send."""

    def __init__(self, folder: Path):
        files = sorted([*folder.glob("Foundation/*.hpp"), *folder.glob("Metal/*.hpp")])
        if not files:
            raise ValueError(f"{folder} holds no metal-cpp headers")
        text = re.sub(r"//[^\n]*|/\*.*?\*/", "", "\n".join(file.read_text() for file in files), flags=re.S)
        pairs = re.findall(r'_(NS|MTL)_PRIVATE_DEF_SEL\(\s*(\w+),\s*"([\w:]+)"\s*\)', text)
        self.selectors = {(space, accessor): selector for space, accessor, selector in pairs}
        self.classes = set(re.findall(r"_(?:NS|MTL)_PRIVATE_DEF_(?:CLS|PRO)\(\s*(\w+)\s*\)", text))
        self.bases = dict(self._bases(text))
        self.methods: dict[tuple[str, str], list[Method]] = {}
        for method in self._methods(text):
            self.methods.setdefault((method.owner, method.selector), []).append(method)

    @staticmethod
    def _bases(text: str):
        """(class, those it inherits from, nearest first): `class A : public NS::Referencing<A, B>` is a B, and what Referencing gives."""
        for name, template, arguments in re.findall(r"\nclass (?:_\w+_EXPORT )?(\w+) : public (?:NS::)?(\w+)<([^>]*)>", text):
            parents = [argument.strip().removeprefix("NS::").removeprefix("MTL::") for argument in arguments.split(",")][1:]
            yield name, [*parents, template, "Referencing"]

    def _methods(self, text: str):
        pattern = (
            r"_INLINE\s+([\w:]+(?:\s*\*+)?|const [\w:]+\s*\*)\s+(NS|MTL)::(\w+)(?:<[^>]*>)?::(\w+)\(([^{}]*)\)\s*(?:const\s*)?\{([^{}]*)\}"
        )
        for result, space, owner, name, parameters, body in re.findall(pattern, text):
            parameters, body = " ".join(parameters.split()), " ".join(body.split())
            # "alloc" and "init" have templates of their own in NS::Object.
            if match := re.fullmatch(r"return (?:NS::)?Object::(alloc|init)<[\w:]+>\((?:_(?:NS|MTL)_PRIVATE_CLS\((\w+)\))?\);", body):
                if bool(match[2]) == (match[1] == "alloc") and not parameters:
                    yield Method(space, owner, name, result, "", match[1], match[2])
                continue
            send = r"(?:return )?(?:NS::)?(?:Object::)?sendMessage(?:Safe)?<[^>]*>\((?:this|_(?:NS|MTL)_PRIVATE_CLS\((\w+)\)), _(NS|MTL)_PRIVATE_SEL\((\w+)\)((?:, \w+)*)\);"
            match = re.fullmatch(send, body)
            if match and match[4].split(", ")[1:] == [name_of(parameter) for parameter in split(parameters)]:
                if selector := self.selectors.get((match[2], match[3])):
                    yield Method(space, owner, name, result, parameters, selector, match[1])

    def find(self, message: Message) -> Method | str:
        """The method that sends it, or why there is none."""
        if message.owner not in self.classes and message.owner != "NSObject":
            return "metal-cpp knows no such class or protocol"
        if message.selector not in self.selectors.values():
            return "metal-cpp registers no such selector"
        own = re.sub("^(NS|MTL)", "", message.owner)
        for owner in [own, *self._ancestors(own)]:
            for method in self.methods.get((owner, message.selector), []):
                if method.to_class == (message.owner if message.to_class else None):
                    return method
        return f"metal-cpp does not send it to {'the class' if message.to_class else 'such an object'}"

    def _ancestors(self, name: str):
        for base in self.bases.get(name, ["Referencing"] if name == "Object" else []):
            yield base
            if base != name:
                yield from self._ancestors(base)
        if name in self.bases:
            yield "Object"


def split(parameters: str) -> list[str]:
    """At the commas outside of parentheses."""
    return [part.strip() for part in re.split(r",(?![^()]*\))", parameters) if part.strip()]


def name_of(parameter: str) -> str:
    return re.search(r"\(\^(\w+)\)|(\w+)(?:\[\])?$", parameter).group(1, 2)[0 if "(^" in parameter else 1]


def type_of(parameter: str) -> str:
    """Of "void (^done)(Buffer*)" it is "void (^)(Buffer*)"."""
    return re.sub(r"\(\^\w+\)", "(^)", parameter) if "(^" in parameter else re.sub(r"\w+$", "", parameter).strip()


def proof_source(found: dict[Message, Method], list_path: Path) -> str:
    """C++ that compiles if every message has the types that metal-cpp sends it with."""
    lines = ["#include <Metal/Metal.hpp>", '#include "message_types.hpp"']
    for message, method in found.items():
        space, owner, result = method.space, method.owner, method.result
        if owner in ("Referencing", "Copying"):  # templates over the class that inherits from them
            space, owner = re.match(r"(NS|MTL)(\w+)", message.owner).groups()
            result = result.replace("_Class", owner)
        types = ", ".join([result, *(type_of(parameter) for parameter in split(method.parameters))])
        sent = f"std::remove_pointer_t<decltype(proof::Chosen<{types}>::of(&{owner}::{method.name}))>"
        lines.append(f"namespace {space} {{ using sent_{message.name} = {sent}; }}")  # inside, as its types are written
        lines.append(f"using {space}::sent_{message.name};")
    lines += [
        "#define LILY_MESSAGE(Class, name, selector, Return, parameters) \\",
        '  static_assert(proof::Agree<Return parameters, sent_##name>::count, "proof of " #name ": another number of arguments"); \\',
        '  static_assert(proof::Agree<Return parameters, sent_##name>::types, "proof of " #name ": other types");',
        "#define LILY_CLASS_MESSAGE LILY_MESSAGE",
        f'#include "{list_path.resolve()}"',
    ]
    return "\n".join(lines) + "\n"


def problems(headers: Headers, include: Path, list_path: Path = LIST) -> list[str]:
    """What is wrong with the list, by message; empty: it is proven."""
    text = list_path.read_text()
    wrong: dict[str, str] = {}
    found: dict[Message, Method] = {}
    for message in messages(text):
        if message.name in {other.name for other in found}:
            wrong[message.name] = "two messages have this name"
            continue
        method = headers.find(message)
        if isinstance(method, str):
            wrong[message.name] = method
        else:
            found[message] = method
    with tempfile.TemporaryDirectory() as folder:
        # Without what is wrong already: the compiler judges the rest.
        lines = text.splitlines()
        kept = Path(folder) / "messages.inc"
        kept.write_text("".join(lines[message.line - 1] + "\n" for message in found))
        source = Path(folder) / "proof.cpp"
        source.write_text(proof_source(found, kept))
        flags = ["-std=c++20", "-fblocks", "-ferror-limit=0", f"-I{HERE}", f"-I{HERE / 'stubs'}", "-isystem", str(include)]
        run = subprocess.run([*COMPILER, *flags, "-c", str(source), "-o", f"{folder}/proof.o"], capture_output=True, text=True)
    for name, what in re.findall(r"error: static assertion failed.*proof of (\w+): ([^\n\"]+)", run.stderr):
        message, method = next(pair for pair in found.items() if pair[0].name == name)
        wrong[name] = f"{what} than in {method}"
    if run.returncode and not any("static assertion failed" in line for line in run.stderr.splitlines()):
        raise RuntimeError(f"the proof does not compile:\n{run.stderr}")
    by_name = {message.name: message for message in messages(text)}
    return [f"{by_name[name].owner} {by_name[name].selector}: {what}" for name, what in wrong.items()]


def main(folder: str, list_path: str = str(LIST)) -> None:
    include, path = Path(folder), Path(list_path)
    if wrong := problems(Headers(include), include, path):
        raise SystemExit("\n".join(wrong))
    print(f"{len(messages(path.read_text()))} messages are as metal-cpp sends them")


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3):
        raise SystemExit(__doc__)
    main(*sys.argv[1:])
