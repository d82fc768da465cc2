"""llama.cpp as a peer on a CPU, through `llama-cpp-python` (pip install builds it; it is no dependency).

Its low-level calls are used, so that nothing of its Python side is timed: a prompt in batches of 512, then greedy
tokens of all sequences together.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

BATCH_TOKENS = 512
ERROR = 4  # of ggml's log levels; llama-cpp-python has numbers of an older release


@ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)
def _log_errors(level: int, text: bytes, user_data: int | None) -> None:
    """Leaves out all else that llama.cpp says: 1,500 lines for a model and a prompt.

    C keeps only the address of this, so it lives as long as the module.
    """
    if level == ERROR:
        sys.stderr.write(text.decode(errors="replace"))


class LlamaCpp:
    def __init__(self, path: Path, threads: int) -> None:
        try:
            import llama_cpp
        except ImportError:
            raise SystemExit(
                "--beside llama.cpp needs it: pip install llama-cpp-python (builds in 20 minutes)"
            ) from None
        self._lib: Any = llama_cpp
        self._threads = threads
        self._lib.llama_log_set(_log_errors, None)
        self._lib.llama_backend_init()
        params = self._lib.llama_model_default_params()
        self._model = self._lib.llama_model_load_from_file(str(path).encode(), params)
        if not self._model:
            raise SystemExit(f"llama.cpp cannot load {path}")
        self._vocab = self._lib.llama_model_get_vocab(self._model)
        self._vocab_size = self._lib.llama_vocab_n_tokens(self._vocab)

    def prepare(self, rows: NDArray[np.int64], new_tokens: int) -> Callable[[Callable[[], None]], None]:
        """A run of these prompts; it calls `tick` after each step that gave tokens."""
        lib, (sequences, prompt_tokens) = self._lib, rows.shape
        params = lib.llama_context_default_params()
        params.n_ctx = sequences * (prompt_tokens + new_tokens + 256)
        params.n_batch = params.n_ubatch = BATCH_TOKENS
        params.n_seq_max = sequences
        params.n_threads = params.n_threads_batch = self._threads
        context = lib.llama_init_from_model(self._model, params)
        batch = lib.llama_batch_init(max(BATCH_TOKENS, sequences), 0, 1)

        def compute(entries: list[tuple[int, int, int, bool]]) -> None:
            """Token, position, sequence and whether its logits are wanted, of each."""
            batch.n_tokens = len(entries)
            for i, (token, position, sequence, wanted) in enumerate(entries):
                batch.token[i], batch.pos[i], batch.logits[i] = token, position, wanted
                batch.n_seq_id[i], batch.seq_id[i][0] = 1, sequence
            if lib.llama_decode(context, batch):
                raise RuntimeError("llama.cpp cannot decode this batch")

        def sampled(index: int) -> int:
            logits = lib.llama_get_logits_ith(context, index)
            return int(
                np.ctypeslib.as_array(ctypes.cast(logits, ctypes.POINTER(ctypes.c_float)), (self._vocab_size,)).argmax()
            )

        def run(tick: Callable[[], None]) -> None:
            lib.llama_memory_clear(lib.llama_get_memory(context), True)
            tokens = []
            for sequence, row in enumerate(rows.tolist()):
                for first in range(0, prompt_tokens, BATCH_TOKENS):
                    part = list(enumerate(row[first : first + BATCH_TOKENS], start=first))
                    compute([(token, at, sequence, at == prompt_tokens - 1) for at, token in part])
                tokens.append(sampled(-1))
            tick()
            for step in range(new_tokens - 1):
                compute([(t, prompt_tokens + step, s, True) for s, t in enumerate(tokens)])
                tokens = [sampled(i) for i in range(sequences)]
                tick()

        return run
