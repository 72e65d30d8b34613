"""Every public name is documented, with an example that runs."""

from __future__ import annotations

import doctest
import importlib
import inspect

import pytest

import lily
from lily import _engine

MODULES = ["messages", "reasoning", "text", "tokenizer", "testing"]
native_missing = pytest.mark.skipif(_engine._native is None, reason="the native extension is not built")


def public():
    """Every public function and class, with the public methods and properties of the classes users hold."""
    for name in lily.__all__:
        value = getattr(lily, name)
        yield name, value
        if name in ("Model", "Session", "SessionStore"):
            members = {attribute: member for base in reversed(value.__mro__[:-1]) for attribute, member in vars(base).items()}
            for attribute, member in members.items():
                if not attribute.startswith("_") and (callable(member) or isinstance(member, (property, classmethod))):
                    yield f"{name}.{attribute}", inspect.unwrap(getattr(value, attribute))


NAMES = dict(public())


def examples(value, name):
    return [test for test in doctest.DocTestFinder(recurse=False).find(value, name, module=False) if test.examples]


@pytest.mark.parametrize("name", NAMES)
def test_a_public_name_has_a_docstring_with_an_example(name):
    assert len(inspect.getdoc(NAMES[name]) or "") > 30
    assert examples(NAMES[name], name), f"{name} has no example"


@native_missing
@pytest.mark.parametrize("name", NAMES)
def test_the_example_runs(name):
    run(examples(NAMES[name], name))


@native_missing
def test_the_example_of_the_package_runs():
    run(examples(lily, "lily"))


@pytest.mark.parametrize("name", MODULES)
def test_examples_that_need_no_engine_run(name, monkeypatch):
    if name == "tokenizer":  # its examples load the shipped model only for its tokenizer
        monkeypatch.setattr(lily.Model, "demo", lambda: lily.testing.scripted(""))
    module = importlib.import_module(f"lily.{name}")
    run([test for test in doctest.DocTestFinder().find(module) if test.examples])


def run(tests):
    assert tests
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    for test in tests:
        output = []
        runner.run(test, out=output.append)
        assert not output, "".join(output)


@pytest.mark.parametrize(
    "name",
    ["Model.generate", "Model.stream", "Model.chat", "Model.stream_chat", "Model.astream_chat", "Session.generate", "Session.stream"],
)
def test_the_options_are_in_the_signature(name):
    parameters = inspect.signature(NAMES[name]).parameters
    assert {"max_tokens", "max_new_tokens", "stop", "logprobs", "temperature", "seed", "sampling"} <= set(parameters)
    assert all(p.kind is p.KEYWORD_ONLY for n, p in parameters.items() if n not in ("self", "prompt", "messages"))


def test_unknown_names_are_attribute_errors():
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = lily.no_such_name
    assert set(lily.__all__) <= set(dir(lily))


def test_a_missing_extension_is_a_device_error_that_says_where(monkeypatch):
    monkeypatch.setattr(_engine, "_native", None)
    monkeypatch.setattr(_engine, "_reason", ImportError("no such file"))
    with pytest.raises(lily.DeviceError, match=r"no such file.*Python 3"):
        lily.devices()
