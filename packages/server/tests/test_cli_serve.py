"""`dagengine serve` as a process: it says what it runs with, answers, and ends with 0 when told to stop."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest
from conftest import DEADLINE_S

from dagengine_server.cli import main
from dagengine_server.client import Client
from dagengine_server.serving import SWITCH_S, check_address, short_turns

PORT_LINE = "Uvicorn running on "


def start(folder: Path, log: Path, *arguments: str, **environment: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", "import sys; from dagengine_server.cli import main; sys.exit(main())"]
    given = ["serve", str(folder), "--port", "0", "--kv-pages", "64", "--page-size", "4", *arguments]
    return subprocess.Popen(
        [*command, *given], stderr=log.open("w"), env={**os.environ, "OMP_NUM_THREADS": "1", **environment}
    )


def url_of(process: subprocess.Popen[bytes], log: Path) -> str:
    end = time.monotonic() + 2 * DEADLINE_S
    while time.monotonic() < end:
        text = log.read_text()
        assert process.poll() is None, text
        if PORT_LINE in text:
            return text.partition(PORT_LINE)[2].split()[0].rstrip('",')
        time.sleep(0.05)
    raise AssertionError(f"it did not start:\n{log.read_text()}")


def test_it_answers_and_drains(model_folder: Path, tmp_path: Path) -> None:
    log, config = tmp_path / "log", tmp_path / "server.toml"
    config.write_text('served-model-name = "small"\nmax-num-seqs = 3\n')
    options = ["--config", str(config), "--api-key", "secret", "--log-format", "json"]
    process = start(model_folder, log, *options, DAGENGINE_MAX_BODY_BYTES="1000")
    try:
        url = url_of(process, log)
        assert httpx.get(f"{url}/health/ready").status_code == 200
        assert httpx.get(f"{url}/v1/models").status_code == 401
        with Client(url, "secret") as client:
            (model,) = client.get("/v1/models")["data"]
            assert model["id"] == "small"
            docs = client.prefill(["the first", "another"])
            assert client.generate("in", context=docs, max_tokens=3).usage.cached_tokens > 0
        long = httpx.post(
            f"{url}/v1/states", json={"input": "x" * 2000}, headers={"Authorization": "Bearer secret"}
        )
        assert long.status_code == 413
        process.send_signal(signal.SIGTERM)
        assert process.wait(DEADLINE_S) == 0
    finally:
        process.kill()
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    messages = [line["message"] for line in lines]
    assert f"option served-model-name = small ({config})" in messages
    assert f"option max-num-seqs = 3 ({config})" in messages
    assert "option max-body-bytes = 1000 (environment DAGENGINE_MAX_BODY_BYTES)" in messages
    assert "option host = 127.0.0.1 (default)" in messages
    assert "1 CPU thread: OMP_NUM_THREADS" in messages
    assert "shutting down" in messages, "nothing runs that a second signal would cancel"
    assert "secret" not in log.read_text()


@pytest.mark.timeout(60)
def test_the_first_signal_tells_what_a_second_one_does_to_what_runs(
    model_folder: Path, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    process = start(model_folder, log, "--kv-pages", "128", "--served-model-name", "small")
    body = {"model": "small", "prompt": "a", "max_tokens": 400, "min_tokens": 400, "stream": True}
    try:
        with httpx.stream(
            "POST", f"{url_of(process, log)}/v1/completions", json=body, timeout=DEADLINE_S
        ) as answer:
            lines = answer.iter_lines()
            next(lines)
            process.send_signal(signal.SIGINT)
            assert "data: [DONE]" in list(lines)
        assert process.wait(DEADLINE_S) == 0
    finally:
        process.kill()
    told = [line for line in log.read_text().splitlines() if "shutting down" in line]
    assert len(told) == 1, told
    assert "1 requests may take 30 seconds; a second Ctrl-C or SIGTERM cancels them" in told[0]


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "model: name a model"),
        (["/no/such/folder"], "model_not_found"),
        (["{model}", "--dtype", "int3"], "dtype"),
        (["{model}", "--attention-backend", "segmentd"], "did you mean 'segmented'?"),
        (["{model}", "--position-policy", "linar"], "did you mean 'linear'?"),
        (["{model}", "--log-format", "xml"], "log_format"),
        (["{model}", "--max-body-bytes", "0"], "max_body_bytes"),
        (["{model}", "--chat-template", "/no/such/file"], "cannot be read"),
    ],
)
def test_a_wrong_option_ends_it_with_one_line(
    arguments: list[str], says: str, model_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [argument.replace("{model}", str(model_folder)) for argument in arguments]
    assert main(["serve", *given, "--port", "0", "--log-level", "error"]) == 1
    error = capsys.readouterr().err
    assert says in error and "Traceback" not in error


def test_an_address_that_cannot_be_had_is_told_before_anything_is_loaded(
    model_folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dagengine.build.build_core", lambda *_, **__: pytest.fail("it was loaded"))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert main(["serve", str(model_folder), "--port", port, "--log-level", "error"]) == 1
    assert f"port: cannot listen on 127.0.0.1, port {port}" in capsys.readouterr().err
    assert main(["serve", str(model_folder), "--host", "192.0.2.1", "--log-level", "error"]) == 1
    assert "host: cannot listen on 192.0.2.1" in capsys.readouterr().err


def test_a_host_is_there_if_one_of_its_addresses_is(monkeypatch: pytest.MonkeyPatch) -> None:
    here, absent = ((socket.AF_INET, socket.SOCK_STREAM, 0, "", (ip, 0)) for ip in ("127.0.0.1", "192.0.2.1"))
    unknown = (255, socket.SOCK_STREAM, 0, "", ("127.0.0.1", 0))
    listed = [absent, unknown, here]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: listed)
    check_address("localhost", 0)
    listed.remove(here)
    with pytest.raises(OSError, match="assign"):
        check_address("localhost", 0)


def test_threads_take_short_turns_while_it_serves() -> None:
    before = sys.getswitchinterval()
    with short_turns():
        assert sys.getswitchinterval() == pytest.approx(SWITCH_S) != before
    assert sys.getswitchinterval() == before
