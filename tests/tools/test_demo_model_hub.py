"""The demo model from a Hugging Face hub: the real client against a hub on this machine."""

from __future__ import annotations

import hashlib
import http.server
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import demo_model

REVISION = "0123456789abcdef0123456789abcdef01234567"
FILES = {
    "config.json": b'{"architectures": ["LlamaForCausalLM"]}',
    "generation_config.json": b"{}",
    "model.safetensors": b"weights" * 1000,
    "tokenizer.json": b"{}",
    "tokenizer_config.json": b'{"chat_template": "..."}',
    "onnx/model.onnx": b"not wanted",
    "training.py": b"raise SystemExit('not wanted')",
}


class Hub(http.server.BaseHTTPRequestHandler):
    """What huggingface_hub asks of a hub to list a model's files and to get them."""

    fails = frozenset[str]()

    def do_GET(self) -> None:
        path = self.path.split("?")[0]
        if "/tree/" in path:
            entries = [
                {"type": "file", "path": name, "size": len(body), "oid": hashlib.sha1(body).hexdigest()}
                for name, body in FILES.items()
            ]
            self._answer(json.dumps(entries).encode())
        elif path.startswith(f"/api/models/{demo_model.HUB_ID}"):
            siblings = [{"rfilename": name} for name in FILES]
            model = {"id": demo_model.HUB_ID, "sha": REVISION, "siblings": siblings}
            self._answer(json.dumps(model).encode())
        else:
            self._file(path)

    def do_HEAD(self) -> None:
        self._file(self.path.split("?")[0])

    def _file(self, path: str) -> None:
        name = path.removeprefix(f"/{demo_model.HUB_ID}/resolve/{REVISION}/")
        if name in FILES and name not in self.fails:
            self._answer(FILES[name])
        else:
            self.send_error(404)

    def _answer(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("ETag", f'"{hashlib.sha1(body).hexdigest()}"')
        self.send_header("X-Repo-Commit", REVISION)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *arguments: object) -> None:
        pass


@pytest.fixture
def hub(request: pytest.FixtureRequest) -> Iterator[str]:
    """The address of a running hub; the parameter, if any, names files that it has lost."""
    handler = type("Handler", (Hub,), {"fails": frozenset(getattr(request, "param", ()))})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def _get(hub: str, cache: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "HF_ENDPOINT": hub, "HF_HUB_DISABLE_XET": "1", "HF_HOME": str(cache / "hf")}
    environment.pop("HF_HUB_OFFLINE", None)
    command = [sys.executable, demo_model.__file__, "--cache", str(cache), "--source", "hub"]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)


def test_the_published_files_are_taken_and_no_others(hub: str, tmp_path: Path) -> None:
    done = _get(hub, tmp_path)
    assert done.returncode == 0, done.stderr
    folder = Path(done.stdout.strip())
    manifest = json.loads((folder / demo_model.MANIFEST).read_text(encoding="utf-8"))
    assert {file.name for file in folder.iterdir()} == {
        name for name in FILES if name in demo_model.HUB_FILES
    } | {demo_model.MANIFEST}
    assert REVISION in manifest["source"]
    assert manifest["weights"] == "as published: bfloat16"
    assert (folder / "model.safetensors").read_bytes() == FILES["model.safetensors"]
    assert demo_model.damaged_files(folder) == []


@pytest.mark.parametrize("hub", [["model.safetensors"]], indirect=True)
def test_a_download_that_breaks_off_leaves_no_folder(hub: str, tmp_path: Path) -> None:
    done = _get(hub, tmp_path)
    assert done.returncode == 1
    assert "could not be had" in done.stderr
    assert [path for path in (tmp_path / "models").iterdir() if path.is_dir()] == []
