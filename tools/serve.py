"""tools/serve: the demo model, served. With --demo: the example runs against the server, which then stops.

Without --demo this process becomes `dagengine serve FOLDER …`; with it, the exit status is the example's.
Further arguments go to `dagengine serve` as they are; with --demo the address is a free one, and there are no keys.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import environment
from environment import CACHE, ROOT, VENV, python, say

READY_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 20.0
KEY_OPTION = "--api-key"
NOT_WITH_DEMO = ("--host", "--port", KEY_OPTION)


class ServerFailed(Exception):
    """The server did not become ready; the message ends with what it printed last."""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextmanager
def running_server(command: Sequence[str], url: str, log: Path, *, timeout_s: float) -> Iterator[None]:
    """Starts a server, waits until GET url/health/ready answers 200, and stops it at the end of the block.

    Raises ServerFailed if it exits before that or takes longer than `timeout_s`.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, cwd=ROOT)
    try:
        _wait_until_ready(process, url, log, timeout_s)
        yield
    finally:
        _stop(process)


def _wait_until_ready(process: subprocess.Popen[bytes], url: str, log: Path, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise ServerFailed(f"the server stopped with status {process.returncode}:\n{_tail(log)}")
        try:
            with urllib.request.urlopen(f"{url}/health/ready", timeout=5) as answer:
                if answer.status == 200:
                    return
        except (urllib.error.URLError, OSError):
            pass
        time.sleep(0.2)
    raise ServerFailed(f"the server was not ready after {timeout_s:.0f} s:\n{_tail(log)}")


def _stop(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
    try:
        process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        print("the server did not stop when asked: killing it", file=sys.stderr)
        process.kill()
        process.wait()


def _tail(log: Path, lines: int = 30) -> str:
    return "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:])


def run_demo(command: Sequence[str]) -> int:
    """Serves on a free port, runs tools/demo.py against it, stops. Returns the example's exit status."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    log = CACHE / "serve-demo.log"
    say(f"starting the server on {url} (its output: {log})")
    try:
        with running_server([*command, "--port", str(port)], url, log, timeout_s=READY_TIMEOUT_S):
            say("running the example")
            return subprocess.run([str(python()), "tools/demo.py", "--url", url], cwd=ROOT).returncode
    except ServerFailed as error:
        print(error, file=sys.stderr)
        return 1


def main(arguments: Sequence[str] | None = None) -> int:
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given in (["-h"], ["--help"]):
        print("usage: tools/serve [--demo] [option of `dagengine serve` …]\n")
        print(f"{(__doc__ or '').strip()}\n\nThe server's options: {VENV / 'bin' / 'dagengine'} serve --help")
        return 0
    demo = "--demo" in given
    given = [argument for argument in given if argument != "--demo"]
    refused = [name for name in NOT_WITH_DEMO if any(a.partition("=")[0] == name for a in given)]
    if demo and refused:
        print(f"--demo serves on a free port and without keys: leave {refused[0]} out", file=sys.stderr)
        return 2
    try:
        environment.ensure("serve")
    except environment.SetupFailed as error:
        print(f"\nset-up {error}", file=sys.stderr)
        return 1
    say("the demo model")
    model = subprocess.run(
        [str(python()), "tools/demo_model.py"], stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    if model.returncode != 0:
        return model.returncode
    command = [str(VENV / "bin" / "dagengine"), "serve", model.stdout.strip(), *given]
    if demo:
        return run_demo(command)
    say(f"serving: {' '.join(shown(command))}")
    os.execv(command[0], command)


def shown(command: Sequence[str]) -> list[str]:
    """A command as it may be printed: without the keys in it."""
    masked = []
    for before, argument in zip(("", *command), command, strict=False):
        if before == KEY_OPTION:
            argument = "…"
        elif argument.startswith(f"{KEY_OPTION}="):
            argument = f"{KEY_OPTION}=…"
        masked.append(argument)
    return masked


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
