"""A `tokenizers.Tokenizer` from GGUF metadata, which holds the vocabulary but not how text is cut.

Two kinds of vocabulary are known by `tokenizer.ggml.model`:

    llama   SentencePiece BPE: spaces are written ▁, unknown characters fall back to bytes, and merges are implied by
            the vocabulary: the pair whose joined piece scores best is merged first
    gpt2    byte-level BPE with its merges; `tokenizer.ggml.pre` says how text is cut before merging
"""

from __future__ import annotations

from collections.abc import Callable, Container
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from windowpane.models.config import ModelError
from windowpane.models.gguf import GgufHeader

# The kinds of token that matter here, by ggml's number.
CONTROL, USER_DEFINED = 3, 4

SPACE = "▁"

# Up to here a text is cut sooner by a tokenizer of its own than the whole one is built.
SHORT_CHARACTERS = 4096

_SHORT_FORMS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3_SPLIT = rf"{_SHORT_FORMS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*{_SPACES}"
_QWEN2_SPLIT = _LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")
_QWEN35_SPLIT = (
    rf"{_SHORT_FORMS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*{_SPACES}"
)
# Words of one case, or that begin with capitals.
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_GPT4O_SPLIT = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_SHORT_FORMS}?|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_SHORT_FORMS}?"
    rf"|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*{_SPACES}"
)
_TEKKEN_SPLIT = _GPT4O_SPLIT.replace(f"{_SHORT_FORMS}?", "").replace(r"\p{N}{1,3}", r"\p{N}")


@dataclass(frozen=True, slots=True)
class _Cut:
    """How text is cut before merging: by `split`, or as GPT-2 does. `digits`: each by itself. `whole_words`: a word of
    the vocabulary is taken whole, even where merges would not lead to it. `composes`: text is put into NFC first.
    """

    split: str | None = None
    digits: bool = False
    whole_words: bool = False
    composes: bool = False
    adds_bos: bool = False

    def pre_tokenizer(self) -> pre_tokenizers.PreTokenizer:
        if self.split is None:
            plain = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
            first = [pre_tokenizers.Digits(individual_digits=True)] if self.digits else []
            return pre_tokenizers.Sequence([*first, plain])
        split = pre_tokenizers.Split(Regex(self.split), behavior="isolated")
        return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


# By `tokenizer.ggml.pre`, as llama.cpp knows them.
_CUTS = {
    **dict.fromkeys(("gpt-2", "phi-2", "mpt"), _Cut()),
    **dict.fromkeys(("smollm", "starcoder", "refact", "codeshell"), _Cut(digits=True)),
    **dict.fromkeys(
        ("llama-bpe", "llama3", "llama-v3", "lfm2", "falcon3", "falcon-h1", "pixtral"),
        _Cut(_LLAMA3_SPLIT, whole_words=True, adds_bos=True),
    ),
    **dict.fromkeys(("dbrx", "smaug-bpe"), _Cut(_LLAMA3_SPLIT)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), _Cut(_QWEN2_SPLIT, composes=True)),
    "qwen35": _Cut(_QWEN35_SPLIT, composes=True),
    **dict.fromkeys(("gpt-4o", "llama4"), _Cut(_GPT4O_SPLIT)),
    "tekken": _Cut(_TEKKEN_SPLIT, whole_words=True, adds_bos=True),
}


def build(header: GgufHeader) -> Tokenizer:
    """The tokenizer of a GGUF file, without the BOS that some models want in front."""
    tokens, kinds = _tokens_and_kinds(header)
    builder = _BUILDERS[header.text("tokenizer.ggml.model") or ""]
    return builder(header, tokens, kinds)


def _tokens_and_kinds(header: GgufHeader) -> tuple[list[str], list[int]]:
    kind = header.text("tokenizer.ggml.model")
    if kind not in _BUILDERS:
        raise ModelError(f"{header.path.name}: unknown tokenizer.ggml.model {kind!r}; known: {', '.join(_BUILDERS)}")
    tokens, kinds = header.texts("tokenizer.ggml.tokens"), header.integers("tokenizer.ggml.token_type")
    if not tokens or len(tokens) != len(kinds):
        raise ModelError(
            f"{header.path.name} has {len(tokens)} tokens and {len(kinds)} token types; its tokenizer cannot be read"
        )
    return tokens, kinds


def adds_bos(header: GgufHeader) -> bool:
    """Whether text begins with BOS. Files that do not say follow llama.cpp's rule: SentencePiece and some cuts do."""
    cut = _CUTS.get(header.text("tokenizer.ggml.pre") or "")
    by_rule = header.text("tokenizer.ggml.model") == "llama" or (cut is not None and cut.adds_bos)
    return header.flag("tokenizer.ggml.add_bos_token", by_rule)


class SentencePiece:
    """A SentencePiece vocabulary, and tokenizers of all of it or of what one text needs."""

    def __init__(self, header: GgufHeader) -> None:
        tokens, kinds = _tokens_and_kinds(header)
        scores = header.numbers("tokenizer.ggml.scores")
        if len(scores) != len(tokens):
            raise ModelError(f"{header.path.name} has {len(tokens)} tokens and {len(scores)} scores")
        # Runs of spaces are stored as such, but text comes to the model with its spaces replaced.
        self.tokens = [token.replace(" ", SPACE) if not token.strip(" ") else token for token in tokens]
        # llama.cpp's converter marks these with -1,000; SentencePiece prefers them to every learned piece.
        self._scores = [0.0 if kind == USER_DEFINED else score for score, kind in zip(scores, kinds, strict=True)]
        pairs = zip(self.tokens, kinds, strict=True)
        self._found_whole = [(token, kind) for token, kind in pairs if kind in (CONTROL, USER_DEFINED)]
        self.vocab = {token: index for index, token in enumerate(self.tokens)}
        self._prefix_space = header.flag("tokenizer.ggml.add_space_prefix", True)
        self._unknown, bos = (header.integer(f"tokenizer.ggml.{role}_token_id") for role in ("unknown", "bos"))
        self._always = [self.tokens[index] for index in (self._unknown, bos) if index is not None]
        self._always += [f"<0x{byte:02X}>" for byte in range(256)]

    @property
    def added(self) -> dict[int, AddedToken]:
        """Tokens that are found whole in any text, by id."""
        return {self.vocab[token.content]: token for tokens in self._added(self.vocab) for token in tokens}

    def tokenizer(self, text: str | None = None) -> Tokenizer:
        """Of all tokens, or of those that this text can be cut into: it gives the same ids, and is there at once."""
        vocab = self.vocab if text is None else self._within(text)
        model = models.BPE(
            vocab=vocab,
            merges=_implied_merges(vocab, self._scores),
            unk_token=None if self._unknown is None else self.tokens[self._unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
        tokenizer = Tokenizer(model)
        to_pieces = normalizers.Replace(" ", SPACE)
        to_text = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
        if self._prefix_space:
            tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), to_pieces])
            tokenizer.decoder = decoders.Sequence([*to_text, decoders.Strip(" ", 1, 0)])
        else:
            tokenizer.normalizer, tokenizer.decoder = to_pieces, decoders.Sequence(to_text)
        special, others = self._added(vocab)
        tokenizer.add_special_tokens(special)
        tokenizer.add_tokens(others)
        return tokenizer

    def _added(self, vocab: Container[str]) -> tuple[list[AddedToken], list[AddedToken]]:
        """Control tokens, which decoding hides, and user-defined ones."""
        return _added_tokens([(token, kind) for token, kind in self._found_whole if token in vocab])

    def _within(self, text: str) -> dict[str, int]:
        """All tokens that are spelled somewhere in the text, as it is written or with its spaces replaced."""
        longest = max(map(len, self.tokens))
        found = {token: self.vocab[token] for token in self._always if token in self.vocab}
        for spelled in (text, SPACE + text.replace(" ", SPACE)):
            for start in range(len(spelled)):
                for stop in range(start + 1, min(start + longest, len(spelled)) + 1):
                    piece = spelled[start:stop]
                    if piece in self.vocab:
                        found[piece] = self.vocab[piece]
        return found


class LazySentencePiece:
    """Has those methods of a `tokenizers.Tokenizer` that one answer to one prompt needs, without building it: single
    tokens are looked up, and the first short text gets a tokenizer of its own. Everything else builds the whole one.
    """

    def __init__(self, pieces: SentencePiece, finish: Callable[[Tokenizer], Tokenizer]) -> None:
        self._pieces, self._finish, self._may_be_small = pieces, finish, True
        self.decoder = pieces.tokenizer("").decoder

    @cached_property
    def whole(self) -> Tokenizer:
        return self._finish(self._pieces.tokenizer())

    def __getattr__(self, name: str) -> Any:
        return getattr(self.whole, name)

    def encode_batch_fast(self, texts: list[str], *, add_special_tokens: bool) -> Any:
        return self._for(texts).encode_batch_fast(texts, add_special_tokens=add_special_tokens)

    def encode_batch(self, texts: list[str], *, add_special_tokens: bool) -> Any:
        return self._for(texts).encode_batch(texts, add_special_tokens=add_special_tokens)

    def token_to_id(self, token: str) -> int | None:
        return self._pieces.vocab.get(token)

    def id_to_token(self, index: int) -> str | None:
        tokens = self._pieces.tokens
        return tokens[index] if index < len(tokens) and self._pieces.vocab[tokens[index]] == index else None

    def get_vocab_size(self, *, with_added_tokens: bool) -> int:
        return len(self._pieces.vocab)  # those added to it are in it

    def get_added_tokens_decoder(self) -> dict[int, AddedToken]:
        return self._pieces.added

    def _for(self, texts: list[str]) -> Tokenizer:
        text, small = "\0".join(texts), self._may_be_small and "whole" not in self.__dict__
        self._may_be_small = False
        return self._finish(self._pieces.tokenizer(text)) if small and len(text) <= SHORT_CHARACTERS else self.whole


def _sentencepiece(header: GgufHeader, tokens: list[str], kinds: list[int]) -> Tokenizer:
    return SentencePiece(header).tokenizer()


def _implied_merges(vocab: dict[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """Every pair of pieces that joins to a piece; best score first, then the longer left and right, then file order."""
    ranked: list[tuple[float, int, int, int, str, str]] = []
    for token, index in vocab.items():
        score = -scores[index]
        length = len(token)
        for cut in range(1, length):
            left = token[:cut]
            if left in vocab and (right := token[cut:]) in vocab:
                ranked.append((score, -cut, cut - length, index, left, right))
    ranked.sort()
    return [(left, right) for *_, left, right in ranked]


def _byte_level(header: GgufHeader, tokens: list[str], kinds: list[int]) -> Tokenizer:
    pre = header.text("tokenizer.ggml.pre") or "gpt-2"
    cut = _CUTS.get(pre)
    if cut is None:
        raise ModelError(f"{header.path.name}: unknown tokenizer.ggml.pre {pre!r}; known: {', '.join(_CUTS)}")
    vocab = {token: index for index, token in enumerate(tokens)}
    merges = [_pair(merge) for merge in header.texts("tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=cut.whole_words))
    if cut.composes:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = cut.pre_tokenizer()
    tokenizer.decoder = decoders.ByteLevel()
    _add_tokens(tokenizer, tokens, kinds)
    return tokenizer


def _pair(merge: str) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    return left, right


_BUILDERS: dict[str, Callable[[GgufHeader, list[str], list[int]], Tokenizer]] = {
    "llama": _sentencepiece,
    "gpt2": _byte_level,
}


def _add_tokens(tokenizer: Tokenizer, tokens: list[str], kinds: list[int]) -> None:
    special, others = _added_tokens(list(zip(tokens, kinds, strict=True)))
    tokenizer.add_special_tokens(special)
    tokenizer.add_tokens(others)


def _added_tokens(pairs: list[tuple[str, int]]) -> tuple[list[AddedToken], list[AddedToken]]:
    """Control tokens, which decoding hides, and user-defined ones: both are found whole in any text."""
    special = [AddedToken(token, normalized=False, special=True) for token, kind in pairs if kind == CONTROL]
    return special, [
        AddedToken(token, normalized=False, special=False) for token, kind in pairs if kind == USER_DEFINED
    ]
