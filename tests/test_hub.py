"""Downloads: only what is needed, the configuration first, resumed after a break, and no network when all is there."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys

import pytest
from checkpoints import FIXTURES, MOE
from hub_server import COMMIT, REPO, HubServer
from variants import read_config, read_tensors, write, write_file

SNAPSHOT = f"models--demo-org--tiny-hybrid/snapshots/{COMMIT}"


@pytest.fixture
def server(tmp_path):
    """The Hub with one repository: the fixture in two shards, and files that Lily has no use for."""
    remote = write(tmp_path / "remote", MOE)
    tensors = read_tensors(MOE)
    (remote / "model.safetensors").unlink()
    weight_map = {}
    for i in range(2):
        file = f"model-0000{i + 1}-of-00002.safetensors"
        names = sorted(tensors)[i::2]
        write_file(remote / file, {name: tensors[name] for name in names})
        weight_map |= dict.fromkeys(names, file)
    (remote / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    for name in ("pytorch_model.bin", "extra.safetensors", "README.md", "model.gguf"):
        (remote / name).write_bytes(b"large and not needed")
    hub = HubServer(remote)
    yield hub
    hub.close()


@pytest.fixture
def lily_in(tmp_path):
    """Runs Python with Lily in a process of its own, with a Hub cache of its own."""

    def run(server, *args, **environment):
        environment = {
            "HF_ENDPOINT": server.url, "HF_HOME": str(tmp_path / "home"), "HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DOWNLOAD_TIMEOUT": "2", "HF_HUB_ETAG_TIMEOUT": "2", "no_proxy": "*",
        } | environment  # fmt: skip
        base = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "HUGGING"))}
        return subprocess.run([sys.executable, *args], capture_output=True, text=True, env=base | environment, timeout=120)

    return run


def pull(lily_in, server, *args, **environment):
    return lily_in(server, "-m", "lily", "pull", REPO, *args, **environment)


def cache(tmp_path):
    return tmp_path / "home" / "hub" / SNAPSHOT


NEEDED = {
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "model.safetensors.index.json",
    "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors",
}  # fmt: skip


def test_pull_downloads_what_is_needed_into_hf_home_and_then_makes_no_call(tmp_path, server, lily_in):
    first = pull(lily_in, server)
    assert (first.returncode, first.stdout) == (0, f"{cache(tmp_path)}\n"), first.stderr
    assert {path.name for path in cache(tmp_path).iterdir()} == NEEDED == set(server.downloaded())
    assert server.downloaded()[0] == "config.json" and set(server.downloaded()[-2:]) == {name for name in NEEDED if "-of-" in name}
    server.requests.clear()
    again = pull(lily_in, server)
    assert (again.returncode, again.stdout, server.requests) == (0, first.stdout, [])
    code = (
        f"import lily; print(lily.Model.from_pretrained({REPO!r}).generate([1, 2], max_tokens=2, ignore_eos=True).usage.generated_tokens)"
    )
    assert lily_in(server, "-c", code).stdout == "2\n" and server.requests == []
    offline = pull(lily_in, server, HF_HUB_OFFLINE="1")
    assert offline.returncode == 0 and server.requests == []
    report = lily_in(server, "-m", "lily", "inspect", REPO)
    assert report.returncode == 0 and server.requests == []
    pull(lily_in, server, "--refresh")
    assert server.requests and server.downloaded() == []


def test_progress_is_in_bytes(server, lily_in):
    code = f"""
import json
from lily import hub
seen = []
hub.resolve({REPO!r}, progress=lambda *event: seen.append(event))
print(json.dumps(seen))
"""
    result = lily_in(server, "-c", code)
    assert result.returncode == 0, result.stderr
    seen = json.loads(result.stdout)
    total = sum((server.directory / name).stat().st_size for name in NEEDED if "-of-" in name)
    assert seen[-1] == ["download", total, total] and len(seen) > 1
    done = [event[1] for event in seen]
    assert done == sorted(done) and all(event[2] == total for event in seen)


def test_another_model_is_refused_before_its_weights_are_downloaded(server, lily_in):
    config = read_config(MOE) | {"model_type": "qwen3_next"}
    (server.directory / "config.json").write_text(json.dumps(config))
    result = pull(lily_in, server)
    assert result.returncode == 1 and "qwen3_next" in result.stderr and result.stdout == ""
    assert server.downloaded() == ["config.json"]


SECOND = "model-00002-of-00002.safetensors"


def second_half():
    tensors = read_tensors(MOE)
    return {name: tensors[name] for name in sorted(tensors)[1::2]}


def ranges(server):
    return [start for method, path, start in server.requests if method == "GET" and path.endswith(SECOND)]


def test_a_lost_connection_is_taken_up_where_it_was(tmp_path, server, lily_in):
    # The library writes in pieces of 10 MiB, so the file must be larger.
    write_file(server.directory / SECOND, {"vision_tower.junk": ("U8", [12 << 20], bytes(12 << 20))} | second_half())
    server.cut_after, server.cuts = {SECOND: 11 << 20}, 1
    assert pull(lily_in, server).returncode == 0
    assert ranges(server) == [None, f"bytes={10 << 20}-"]
    assert (cache(tmp_path) / SECOND).read_bytes() == (server.directory / SECOND).read_bytes()


def test_a_broken_download_says_what_is_missing_and_keeps_what_is_whole(tmp_path, server, lily_in):
    server.cut_after, size = {SECOND: 500_000}, (server.directory / SECOND).stat().st_size
    broken = pull(lily_in, server)
    assert broken.returncode == 1 and broken.stdout == ""
    last = broken.stderr.splitlines()[-1]  # before it, the library says that it tries again
    assert last.startswith(f"Error: {REPO}: ") and f"{SECOND} lacks all of its {size} bytes" in last and "00001-of" not in last
    inspected = lily_in(server, "-m", "lily", "inspect", REPO)
    assert inspected.returncode == 1 and SECOND in inspected.stdout
    server.cut_after = {}
    server.requests.clear()
    assert pull(lily_in, server).returncode == 0
    assert server.downloaded() == [SECOND]
    for name in NEEDED:
        assert (cache(tmp_path) / name).read_bytes() == (server.directory / name).read_bytes()


def test_a_file_that_lost_its_end_is_downloaded_again(tmp_path, server, lily_in):
    assert pull(lily_in, server).returncode == 0
    path = (cache(tmp_path) / SECOND).resolve()
    whole = path.read_bytes()
    path.write_bytes(whole[:-777])
    offline = pull(lily_in, server, HF_HUB_OFFLINE="1")
    assert offline.returncode == 1 and f"{SECOND} lacks 777 bytes" in offline.stderr
    assert "HF_HUB_OFFLINE" in offline.stderr
    server.requests.clear()
    assert pull(lily_in, server).returncode == 0
    assert server.downloaded() == [SECOND]
    assert (cache(tmp_path) / SECOND).read_bytes() == whole


def test_a_revision_is_a_snapshot_of_its_own(tmp_path, server, lily_in):
    other = "f" * 40
    server.revisions |= {"v2": other, other: other}
    result = pull(lily_in, server, "--revision", "v2")
    assert result.returncode == 0 and result.stdout.strip().endswith(other)
    server.requests.clear()
    assert pull(lily_in, server, "--revision", "v2").returncode == 0 and server.requests == []
    unknown = pull(lily_in, server, "--revision", "v3")
    assert unknown.returncode == 1 and "no revision 'v3'" in unknown.stderr


def test_what_is_not_there_is_said_in_one_line(server, lily_in):
    unknown = lily_in(server, "-m", "lily", "pull", "demo-org/nothing")
    assert unknown.returncode == 1 and "no such repository" in unknown.stderr and unknown.stderr.count("\n") == 1
    offline = pull(lily_in, server, HF_HUB_OFFLINE="1")
    assert offline.returncode == 1 and "HF_HUB_OFFLINE" in offline.stderr and offline.stderr.count("\n") == 1
    assert lily_in(server, "-m", "lily", "pull", str(FIXTURES)).returncode == 2


def test_a_checkpoint_without_an_index_needs_only_model_files(tmp_path, server, lily_in):
    for path in server.directory.glob("model*"):
        path.unlink()
    shutil.copyfile(FIXTURES / MOE / "model.safetensors", server.directory / "model.safetensors")
    assert pull(lily_in, server).returncode == 0
    assert {path.name for path in cache(tmp_path).glob("*.safetensors")} == {"model.safetensors"}
    server.requests.clear()
    assert pull(lily_in, server).returncode == 0 and server.requests == []
