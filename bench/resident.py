"""What a process holds with a GGUF model and a filled context: `python -m bench.resident ENGINE MODEL TOKENS`.

The model is an embedded one's name, or a file.

Prints two figures of resident memory: with everything imported and the tokenizer read, and with the weights loaded and
a prompt of that many tokens computed. A process of its own for each engine, so that neither sees what the other took.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np


def resident_bytes(engine: str, model: str, tokens: int) -> tuple[int, int]:
    """Before and after loading and computing, from a fresh process."""
    command = [sys.executable, "-m", "bench.resident", engine, model, str(tokens)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        last = (done.stderr.splitlines() or ["no message"])[-1]
        raise SystemExit(f"bench.resident {engine} {model}: exit status {done.returncode}, {last}")
    before, after = json.loads(done.stdout.splitlines()[-1])
    return before, after


def _resident() -> int:
    status = Path("/proc/self/status").read_text()
    return int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmRSS:"))) * 1024


def main() -> None:
    engine, model, tokens = sys.argv[1], sys.argv[2], int(sys.argv[3])
    import torch

    from bench.llama_cpp import LlamaCpp
    from windowpane import LLM, SamplingParams
    from windowpane.models.embedded import embedded_path
    from windowpane.text import load_tokenizer

    if engine == "llama.cpp":
        import llama_cpp  # noqa: F401
    path = Path(model) if Path(model).is_file() else embedded_path(model)
    tokenizer = load_tokenizer(path)
    prompt = np.random.default_rng(0).integers(5, 40_000, tokens - 8)
    before = _resident()
    if engine == "llama.cpp":
        LlamaCpp(path, torch.get_num_threads()).prepare(prompt[None], 8)(lambda: None)
    else:
        llm = LLM(str(path), device="cpu", max_model_len=tokens, max_num_seqs=1, kv_cache_memory_bytes=256 * 2**20)
        llm.generate([prompt.tolist()], SamplingParams(max_tokens=8, temperature=0, ignore_eos=True))
    print(json.dumps([before, _resident()]))
    del tokenizer


if __name__ == "__main__":
    main()
