"""Models of the Hugging Face hub, from a fake server that answers huggingface_hub like the real hub."""

import hashlib
import http.server
import json
import pathlib
import re
import shutil
import sys
import threading
import types
import urllib.parse
from typing import ClassVar

import numpy as np
import pytest

import bertjax
from bertjax.common.errors import UserError
from bertjax.config import experiments
from bertjax.config.defaults import pretraining_config
from bertjax.finetuning import run as finetuning_run
from bertjax.interop import conversion, hub, pretrained
from tests.interop.test_golden import GOLDEN
from tests.interop.test_model_card import made_run, read_card
from tests.interop.test_peft_adapter import made_adapter
from tests.processes import run

huggingface_hub = pytest.importorskip("huggingface_hub")

ENDPOINT = pytest.importorskip("huggingface_hub.constants").ENDPOINT
COMMIT = "0123456789abcdef0123456789abcdef01234567"
FILES = {path.name: path.read_bytes() for path in GOLDEN.iterdir() if path.suffix != ".npz"}
REPOSITORIES = {
    "org/bert": FILES | {"pytorch_model.bin": b"pickle", "README.md": b"card", "onnx/model.safetensors": b"other"},
    "org/pickled": {"config.json": FILES["config.json"], "pytorch_model.bin": b"pickle"},
    "org/data": {"train.csv": b"text,label\n"},
    "org/tasks": FILES,
}


class Hub(http.server.BaseHTTPRequestHandler):
    """A server on which branch main and tag v1 of every repository are `COMMIT`."""

    def do_GET(self):
        path, asked = urllib.parse.unquote(self.path.partition("?")[0]), self.server.asked
        name = "/".join(path.removeprefix("/api/models").split("/")[1:3])
        if name not in REPOSITORIES:
            return self.answer(404, b"{}", {"X-Error-Code": "RepoNotFound"})
        files, (kind, revision, *rest) = REPOSITORIES[name], path.partition(name)[2].split("/")[1:]
        if revision not in ("main", "v1", COMMIT):
            return self.answer(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
        if kind == "revision":
            return self.answer(200, json.dumps({"id": name, "sha": COMMIT, "siblings": []}).encode())
        if kind == "tree":
            tree = [{"type": "file", "path": p, "size": len(x), "oid": digest(x)} for p, x in files.items()]
            return self.answer(200, json.dumps(tree).encode())
        content = files["/".join(rest)]
        if self.command == "GET":
            asked.append("/".join(rest))
        return self.answer(200, content, {"ETag": f'"{digest(content)}"', "X-Repo-Commit": COMMIT})

    do_HEAD = do_GET

    def answer(self, code: int, content: bytes, headers=types.MappingProxyType({})):
        self.send_response(code)
        for name, value in {"Content-Length": len(content), **headers}.items():
            self.send_header(name, str(value))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    def log_message(self, *_):
        pass


def digest(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()


@pytest.fixture
def server():
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        server.asked = []
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


@pytest.mark.slow
def test_a_model_is_downloaded_once_with_only_the_needed_files(server, tmp_path):
    here = dict(HF_ENDPOINT=f"http://127.0.0.1:{server.server_port}", HF_HOME=str(tmp_path / "home"))

    def convert(source: str, **environment: str):
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
        arguments = f"--source={source}", "--output=out", "--format=huggingface"
        return run("convert", *arguments, cwd=tmp_path, **(here | environment))

    first = convert("hub:org/bert")
    assert first.returncode == 0 and first.stdout.startswith("huggingface -> huggingface:"), first.stderr
    assert sorted(server.asked) == sorted(FILES)
    assert (tmp_path / "out" / "vocab.txt").read_bytes() == FILES["vocab.txt"]
    snapshot = tmp_path / "home" / "hub" / "models--org--bert" / "snapshots" / COMMIT
    assert {path.name for path in snapshot.iterdir()} == FILES.keys()
    assert convert("hub:org/bert@v1").returncode == 0 and len(server.asked) == len(FILES)
    server.shutdown()
    assert convert("hub:org/bert", HF_HUB_OFFLINE="1").returncode == 0


def with_adapter(folder) -> dict[str, bytes]:
    """Returns the files of a model, with an adapter of this model in the folder `query`."""
    adapter = made_adapter(folder / "made", base="org/tasks")
    return FILES | {f"query/{path.name}": path.read_bytes() for path in adapter.iterdir()}


def test_an_adapter_in_a_folder_of_a_repository_is_read_with_its_base(server, tmp_path, monkeypatch):
    monkeypatch.setitem(REPOSITORIES, "org/tasks", with_adapter(tmp_path))
    here, constants = f"http://127.0.0.1:{server.server_port}", huggingface_hub.constants
    for name, value in {"ENDPOINT": here, "HF_HUB_CACHE": str(tmp_path / "cache")}.items():
        monkeypatch.setattr(constants, name, value)
    template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(ENDPOINT, here)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    source = pretrained.read_pretrained("hub:org/tasks/query@v1")
    golden = pretrained.read_pretrained(GOLDEN)
    kernels = (
        x.params["bert"]["encoder"]["layers"]["attention"]["query_key_value"]["kernel"] for x in (source, golden)
    )
    assert source.format == "peft" and np.abs(np.subtract(*kernels)).max() == pytest.approx(6, abs=1e-5)
    assert source.tokenizer.fingerprint == golden.tokenizer.fingerprint


@pytest.mark.parametrize(
    "source, settings, message",
    [
        ("org/none", {}, "hub:org/none: not on {here}, or private; correct the name, or run hf auth login"),
        ("org/bert@v2", {}, "hub:org/bert@v2: {here} has the model, but not this revision"),
        ("org/pickled", {}, "hub:org/pickled: has no model.safetensors; download other weights with hf download "),
        ("org/data", {}, "hub:org/data: has no config.json; choose a model of transformers"),
        ("org/tasks/other", {}, "hub:org/tasks/other: the repository has no folder 'other'; its adapters are query"),
        ("org/bert/other", {}, "hub:org/bert/other: has no config.json; choose a model of transformers"),
        ("org/bert", {"HF_HUB_OFFLINE": True}, "hub:org/bert: incomplete in {cache}, and HF_HUB_OFFLINE is set"),
        (
            "org/bert",
            {"ENDPOINT": "http://127.0.0.1:9"},
            "hub:org/bert: incomplete in {cache}, and http://127.0.0.1:9 cannot be reached",
        ),
    ],
)
def test_an_unavailable_model_is_named_in_one_line(server, tmp_path, monkeypatch, source, settings, message):
    monkeypatch.setitem(REPOSITORIES, "org/tasks", with_adapter(tmp_path))
    here, constants = f"http://127.0.0.1:{server.server_port}", huggingface_hub.constants
    for name, value in ({"ENDPOINT": here, "HF_HUB_CACHE": str(tmp_path)} | settings).items():
        monkeypatch.setattr(constants, name, value)
    template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(ENDPOINT, constants.ENDPOINT)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    with pytest.raises(UserError) as error:
        pretrained.find(f"hub:{source}")
    assert str(error.value).startswith(message.format(here=here, cache=tmp_path)) and "\n" not in str(error.value)


def test_hub_names_are_accepted_in_place_of_paths(monkeypatch):
    monkeypatch.setattr(hub, "download_repository", {hub.Repository("org/bert", "v1"): GOLDEN}.get)
    assert bertjax.load("hub:org/bert@v1").path == str(GOLDEN)
    config = experiments.load("classify")
    config.init_checkpoint, config.max_seq_length = "hub:org/bert@v1", 16
    config, _ = finetuning_run.resolve(config, None, with_data=False)
    assert config.model.intermediate_size == 48


class Api:
    """Records the requests to huggingface_hub."""

    asked: ClassVar[list] = []

    def __init__(self, library_name):
        assert library_name == "bertjax"

    def whoami(self):
        self.asked.append(("whoami",))

    def create_repo(self, name, **settings):
        self.asked.append(("create", name, settings))
        return f"https://huggingface.co/{name}"

    def upload_folder(self, *, repo_id, folder_path, commit_message):
        self.asked.append(("upload", repo_id, sorted(path.name for path in pathlib.Path(folder_path).iterdir())))


@pytest.fixture
def asked(monkeypatch):
    monkeypatch.setattr(huggingface_hub, "HfApi", Api)
    monkeypatch.setattr(Api, "asked", [])
    return Api.asked


def test_a_run_is_pushed_with_a_model_card(asked, tmp_path):
    config = pretraining_config()
    config.init_checkpoint = "hub:org/bert@v1"
    run = made_run(tmp_path / "run", config, {"mlm_loss": 2.5})
    printed = conversion.convert(run, tmp_path / "out", "huggingface", push="me/mine", is_private=True)
    assert printed.endswith("; pushed to https://huggingface.co/me/mine")
    files = ["README.md", "config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "vocab.txt"]
    create = ("create", "me/mine", {"private": True, "exist_ok": True})
    assert asked == [("whoami",), create, ("upload", "me/mine", files)]
    metadata, _, text = read_card(tmp_path / "out")
    assert metadata["base_model"] == "org/bert" and "# me/mine\n" in text and 'model="me/mine"' in text


@pytest.mark.parametrize(
    "arguments, message",
    [
        (dict(to="tf1", push="me/mine"), "--push=me/mine: only for --format=huggingface, sentence-transformers, peft"),
        (dict(to="huggingface", push="mine"), "--push=mine: must be USER/NAME, where USER is a user or an "),
        (dict(to="huggingface", push="me/a b"), "--push=me/a b: Repo id must "),
        (dict(to="huggingface", is_private=True), "--private: needs --push=USER/NAME"),
    ],
)
def test_a_failing_push_check_writes_nothing(asked, tmp_path, arguments, message):
    with pytest.raises(UserError) as error:
        conversion.convert(GOLDEN, tmp_path / "out", **arguments)
    assert str(error.value).startswith(message) and not asked and not (tmp_path / "out").exists()


def test_a_failed_push_keeps_the_written_folder(asked, tmp_path, monkeypatch):
    def fail(*_, **__):
        raise huggingface_hub.errors.LocalTokenNotFoundError("a token is\nneeded")

    out = tmp_path / "out"
    monkeypatch.setattr(Api, "upload_folder", fail)
    remedy = f"hf auth login, or set HF_TOKEN; push the written folder with hf upload me/mine {out}"
    with pytest.raises(UserError, match=re.escape(f"--push=me/mine: no user is logged in; run {remedy}")):
        conversion.convert(GOLDEN, out, "huggingface", push="me/mine")
    assert (out / "model.safetensors").exists()
    monkeypatch.setattr(Api, "whoami", fail)
    with pytest.raises(UserError, match="--push=me/mine: no user is logged in"):
        conversion.convert(GOLDEN, tmp_path / "other", "huggingface", push="me/mine")
    assert not (tmp_path / "other").exists()


def test_missing_huggingface_hub_is_named(monkeypatch):
    with pytest.raises(UserError, match=r"^hub:a/b c: Repo id must "):
        pretrained.find("hub:a/b c")
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(UserError, match=r"^hub:org/x: needs huggingface_hub: pip install 'bertjax\[hub\]'$"):
        pretrained.find("hub:org/x")
    with pytest.raises(UserError, match=r"^--push=me/mine: needs huggingface_hub"):
        conversion.convert(GOLDEN, "out", "huggingface", push="me/mine")
