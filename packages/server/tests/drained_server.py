"""Servers over the tiny model, for tests of signals. Imports once and forks: importing takes seconds.

Commands on stdin, one answer line each on stdout:
    serve PORT SHUTDOWN_TIMEOUT STEP_SECONDS → pid
    wait PID                                 → exit status, negative for a signal
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any

from dagengine import EngineConfig
from dagengine.async_engine import EngineThread
from dagengine.build import build_core
from dagengine_server.app import create_app
from dagengine_server.serving import serve
from dagengine_server.settings import ServerSettings


def run(folder: str, port: int, timeout_s: float, step_s: float) -> int:
    core: Any = build_core(folder, EngineConfig(device="cpu", kv_pages=160, page_size=4, threads=1))
    step = core.step

    def slowed() -> Any:
        time.sleep(step_s)
        return step()

    core.step = slowed
    app = create_app(EngineThread(core), ServerSettings(served_model_name="tiny"))
    return serve(app, port=port, shutdown_timeout_s=timeout_s, log_level="warning")


def main(folder: str) -> None:
    for line in sys.stdin:
        command, *words = line.split()
        if command == "serve":
            answer = os.fork()
            if answer == 0:
                os._exit(run(folder, int(words[0]), float(words[1]), float(words[2])))
        else:
            answer = os.waitstatus_to_exitcode(os.waitpid(int(words[0]), 0)[1])
        print(answer, flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
