"""Tokens to text as they come, never half a character: what is not yet a whole one is held back."""

from __future__ import annotations

from codecs import getincrementaldecoder
from collections.abc import Collection

from windowpane.text.tokenizer import Tokenizer


class Detokenizer:
    """The text of one generation, piece by piece. All pieces and `finish` joined are the text of all tokens.

    The text continues a prompt, so a leading space belongs to it and is kept. Special tokens of `kept_special_ids` are
    shown though others are skipped: they are the markers that parsers of reasoning and tool calls look for.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        skip_special_tokens: bool = True,
        kept_special_ids: Collection[int] = (),
    ) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._kept_special_ids = kept_special_ids
        self._decoder = getincrementaldecoder("utf-8")(errors="replace")
        self._is_open = False  # a character has begun and not ended

    def push(self, token_id: int) -> str:
        """What this token completes; empty while a character is still open."""
        skip = self._skip_special_tokens and token_id not in self._kept_special_ids
        encoded = self._tokenizer.token_bytes(token_id, skip)
        if not self._is_open and encoded.isascii():  # most tokens; the decoder takes five times as long
            return encoded.decode("ascii")
        text = self._decoder.decode(encoded)
        self._is_open = bool(self._decoder.getstate()[0])
        return text

    def copy(self) -> Detokenizer:
        """Another one, where this one stands."""
        made = Detokenizer(self._tokenizer, self._skip_special_tokens, self._kept_special_ids)
        made._decoder.setstate(self._decoder.getstate())
        made._is_open = self._is_open
        return made

    def finish(self) -> str:
        """What was still held back when the generation ended: U+FFFD for a broken character, else nothing."""
        return self._decoder.decode(b"", final=True)
