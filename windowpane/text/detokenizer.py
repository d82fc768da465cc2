"""Tokens to text as they come, never half a character: what is not yet a whole one is held back."""

from __future__ import annotations

from codecs import getincrementaldecoder

from windowpane.text.tokenizer import Tokenizer


class Detokenizer:
    """The text of one generation, piece by piece. All pieces and `finish` joined are the text of all tokens.

    The text continues a prompt, so a leading space belongs to it and is kept.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._decoder = getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        """What this token completes; empty while a character is still open."""
        return self._decoder.decode(self._tokenizer.token_bytes(token_id, self._skip_special_tokens))

    def finish(self) -> str:
        """What was still held back when the generation ended: U+FFFD for a broken character, else nothing."""
        return self._decoder.decode(b"", final=True)
