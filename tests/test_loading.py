"""`Model.from_pretrained`: what it checks and hands to the engine, directories, and the Hub."""

from __future__ import annotations

import shutil
import socket
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from checkpoint_files import MOE, copy, load

import lily
from lily import CheckpointError, hub
from lily.checkpoint import INDEX
from lily.convert import convert


@pytest.fixture
def engine(monkeypatch):
    """Stands in for the extension and notes the arguments of the model it is asked to make."""
    import lily.loading
    import lily.model
    from lily.testing import ScriptedEngine

    asked = SimpleNamespace(calls=[])

    def make(spec, weights, device, max_context, memory_limit, progress):
        asked.calls.append((spec, weights, device, max_context, memory_limit))
        if progress is not None:
            progress("load", 1, 2)
            progress("load", 2, 2)
        return ScriptedEngine(lambda tokens: None, spec["vocab_size"], max_context)

    extension = SimpleNamespace(Model=make, devices=lambda: [{"name": "cpu"}, {"name": "cpu:float32"}])
    monkeypatch.setattr(lily.loading, "native", lambda: extension)
    return asked


def test_a_directory_becomes_a_model(engine):
    seen = []
    with lily.Model.from_pretrained(MOE, max_context=128, memory_limit=1 << 30, progress=lambda *event: seen.append(event)) as model:
        assert model.max_context == 128 and model.end_tokens == {0, 1} and model.defaults.top_k == 20
        assert model.template is not None and model.source == str(MOE) and "16 experts" in repr(model)
    spec, weights, device, max_context, memory_limit = engine.calls[0]
    assert spec == model.config.spec() and weights == load(MOE)
    assert (device, max_context, memory_limit) == ("auto", 128, 1 << 30)
    assert seen == [("load", 1, 2), ("load", 2, 2)]


def test_the_shipped_model_is_found_and_is_whole(engine):
    model = lily.Model.demo(progress=False)
    assert model.config.num_layers == 8 and engine.calls[0][3] == model.config.max_context == 32768
    assert model.end_tokens == {6135, 6137}


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"max_context": 0}, ValueError, "max_context"),
        ({"max_context": 4097}, ValueError, "4096"),
        ({"max_context": True}, TypeError, "max_context"),
        ({"memory_limit": -1}, ValueError, "memory_limit"),
        ({"memory_limit": "8GB"}, TypeError, "memory_limit"),
        ({"max_context": 1 << 70}, ValueError, "4096"),
        ({"max_context": 128.0}, TypeError, "max_context is 128.0, expected"),
        ({"memory_limit": 1 << 70}, ValueError, f"memory_limit is {1 << 70}, expected at most {(1 << 63) - 1} bytes"),
        ({"memory_limit": 1e9}, TypeError, "memory_limit"),
        ({"progress": "yes"}, TypeError, "progress"),
        ({"device": 5}, TypeError, "device is 5, expected a name such as 'auto' or 'cpu'"),
        ({"device": None}, TypeError, "device is None"),
        ({"device": "tpu"}, lily.DeviceError, "device 'tpu' is not available here, expected one of: auto, cpu, cpu:float32"),
        ({"device": ""}, lily.DeviceError, "device ''"),
        ({"refresh": "no"}, TypeError, "refresh is 'no', expected True or False"),
        ({"revision": 5}, TypeError, "revision is 5, expected the name of a branch"),
        ({"revision": ""}, ValueError, "revision ''"),
        ({"quantize": "4"}, TypeError, "quantize is '4', expected 4, 8 or None"),
    ],
)
def test_bad_loading_options_are_refused_before_anything_is_read(engine, monkeypatch, options, error, message):
    monkeypatch.setattr(lily.model, "load_weights", lambda *args: pytest.fail("weights were looked at"))
    with pytest.raises(error, match=message):
        lily.Model.from_pretrained(MOE, **options)
    assert engine.calls == []


@pytest.mark.parametrize("call", [lily.Model.from_pretrained, lily.inspect, lily.plan, hub.resolve, lambda source: convert(source, "x")])
@pytest.mark.parametrize(("source", "error"), [(5, TypeError), (None, TypeError), (b"owner/name", TypeError), ("a\0b", ValueError)])
def test_what_cannot_name_a_checkpoint_is_refused_by_every_call(call, source, error):
    with pytest.raises(error, match="expected a directory or a Hub id|no such name"):
        call(source)


def test_a_tokenizer_of_another_model_is_refused(engine, tmp_path):
    copy(tmp_path)
    shutil.copy(lily.model.DEMO / "tokenizer.json", tmp_path / "tokenizer.json")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json has ids up to 6143"):
        lily.Model.from_pretrained(tmp_path)


def test_a_bar_is_shown_on_a_terminal_only(engine, monkeypatch, capsys):
    monkeypatch.delitem(sys.modules, "ipykernel", raising=False)  # a notebook shows bars too, and another test may have been one
    lily.Model.from_pretrained(MOE)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    lily.Model.from_pretrained(MOE)
    out, err = capsys.readouterr()
    assert out == "" and "load" in err


# The Hub


@pytest.fixture
def no_network(monkeypatch):
    def refuse(*args, **kwargs):
        raise OSError("the network is blocked in this test")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket, "create_connection", refuse)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A Hub cache that holds the fixture as demo-org/tiny-hybrid."""
    from huggingface_hub import constants

    commit = "0123456789abcdef0123456789abcdef01234567"
    repo = tmp_path / "models--demo-org--tiny-hybrid"
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text(commit)
    snapshot = repo / "snapshots" / commit
    snapshot.mkdir(parents=True)
    copy(snapshot, index=True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    return snapshot


def test_a_complete_snapshot_makes_no_network_call(cache, no_network):
    assert hub.resolve("demo-org/tiny-hybrid") == cache
    assert hub.find_config("demo-org/tiny-hybrid") == cache / "config.json"


@pytest.mark.parametrize("gone", ["tokenizer.json", "model.safetensors", "config.json"])
def test_an_incomplete_snapshot_asks_the_hub_and_says_why_it_fails(cache, no_network, gone):
    (cache / gone).unlink()
    with pytest.raises(CheckpointError, match="could not be reached"):
        hub.resolve("demo-org/tiny-hybrid")


def test_refresh_without_a_network_is_a_clear_error(cache, no_network):
    with pytest.raises(CheckpointError, match="demo-org/tiny-hybrid: the Hub could not be reached"):
        hub.resolve("demo-org/tiny-hybrid", refresh=True)


def test_a_directory_comes_first(tmp_path, monkeypatch):
    (tmp_path / "demo-org").mkdir()
    copy(tmp_path / "demo-org")
    monkeypatch.chdir(tmp_path)
    assert hub.resolve("demo-org") == Path("demo-org")


@pytest.mark.parametrize("source", ["no-such-directory", "./a/b/c", "/nowhere/at/all", "a/../b", ""])
def test_neither_directory_nor_id(source, no_network, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if source == "":  # the current directory, which holds no checkpoint
        assert not hub.is_complete(hub.resolve(source))
        return
    with pytest.raises(CheckpointError, match="no such directory"):
        hub.resolve(source)


def test_a_file_is_not_a_checkpoint(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match="expected the directory"):
        hub.resolve(tmp_path / "model.safetensors")


class FakeHub:
    """Serves a directory in place of the Hub and notes what was asked for."""

    def __init__(self, source, target):
        self.source, self.target, self.asked = source, target, []

    def model_info(self, repo, **kwargs):
        files = [SimpleNamespace(rfilename=p.name, size=p.stat().st_size) for p in sorted(self.source.iterdir())]
        return SimpleNamespace(siblings=files, sha="x")

    def hf_hub_download(self, repo, name, **kwargs):
        self.asked.append(name)
        return shutil.copy(self.source / name, self.target / name)

    def snapshot_download(self, repo, *, local_files_only=False, allow_patterns, **kwargs):
        if local_files_only:
            raise FileNotFoundError
        for name in allow_patterns:
            self.hf_hub_download(repo, name)
        return str(self.target)


@pytest.fixture
def fake(tmp_path, monkeypatch):
    import huggingface_hub

    (tmp_path / "remote").mkdir()
    (tmp_path / "local").mkdir()
    copy(tmp_path / "remote", index=True)
    (tmp_path / "remote" / "other.safetensors").write_bytes(b"large and not needed")
    server = FakeHub(tmp_path / "remote", tmp_path / "local")
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: server)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", server.hf_hub_download)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", server.snapshot_download)
    return server


def test_a_download_takes_the_config_first_and_only_what_is_needed(fake):
    seen = []
    path = hub.resolve("demo-org/tiny-hybrid", progress=lambda *event: seen.append(event))
    assert hub.is_complete(path) and fake.asked[0] == "config.json"
    assert "other.safetensors" not in fake.asked and fake.asked[-1] == "model.safetensors"
    size = (MOE / "model.safetensors").stat().st_size
    assert seen[-1][0] == "download" and abs(seen[-1][1] - size) < 4096 and seen[-1][1] == seen[-1][2]


def test_an_unsupported_model_is_refused_before_its_weights_are_downloaded(fake):
    path = fake.source / "config.json"
    path.write_text(path.read_text().replace('"qwen3_5_moe"', '"qwen3_next"'))
    with pytest.raises(CheckpointError, match="qwen3_next"):
        hub.resolve("demo-org/tiny-hybrid")
    assert fake.asked == ["config.json"]


def test_an_index_of_another_layout_is_refused_before_the_weights_are_downloaded(fake):
    path = fake.source / INDEX
    path.write_text(path.read_text().replace("layers.0.mlp.gate.weight", "layers.0.mlp.gates.weight"))
    with pytest.raises(CheckpointError, match=r"layers\.0\.mlp\.gate"):
        hub.resolve("demo-org/tiny-hybrid")
    assert "model.safetensors" not in fake.asked


@pytest.mark.parametrize("gone", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_repository_that_lacks_a_file_is_refused(fake, gone):
    (fake.source / gone).unlink()
    with pytest.raises(CheckpointError, match=gone):
        hub.resolve("demo-org/tiny-hybrid")
