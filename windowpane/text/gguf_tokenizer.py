"""A `tokenizers.Tokenizer` from GGUF metadata, which holds the vocabulary but not how text is cut.

Two kinds of vocabulary are known by `tokenizer.ggml.model`:

    llama   SentencePiece BPE: spaces are written ▁, unknown characters fall back to bytes, and merges are implied by
            the vocabulary: the pair whose joined piece scores best is merged first
    gpt2    byte-level BPE with its merges; `tokenizer.ggml.pre` says how text is cut before merging
"""

from __future__ import annotations

from collections.abc import Callable

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from windowpane.models.config import ModelError
from windowpane.models.gguf import GgufHeader

# The kinds of token that matter here, by ggml's number.
CONTROL, USER_DEFINED = 3, 4

SPACE = "▁"

_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def build(header: GgufHeader) -> Tokenizer:
    """The tokenizer of a GGUF file, without the BOS that some models want in front."""
    kind = header.text("tokenizer.ggml.model")
    builder = _BUILDERS.get(kind or "")
    if builder is None:
        raise ModelError(f"{header.path.name}: unknown tokenizer.ggml.model {kind!r}; known: {', '.join(_BUILDERS)}")
    tokens, kinds = header.texts("tokenizer.ggml.tokens"), header.integers("tokenizer.ggml.token_type")
    if not tokens or len(tokens) != len(kinds):
        raise ModelError(
            f"{header.path.name} has {len(tokens)} tokens and {len(kinds)} token types; its tokenizer cannot be read"
        )
    return builder(header, tokens, kinds)


def adds_bos(header: GgufHeader) -> bool:
    """Whether text begins with BOS. Files that do not say follow llama.cpp's rule: SentencePiece does."""
    return header.flag("tokenizer.ggml.add_bos_token", header.text("tokenizer.ggml.model") == "llama")


def _sentencepiece(header: GgufHeader, tokens: list[str], kinds: list[int]) -> Tokenizer:
    scores = header.numbers("tokenizer.ggml.scores")
    if len(scores) != len(tokens):
        raise ModelError(f"{header.path.name} has {len(tokens)} tokens and {len(scores)} scores")
    # Runs of spaces are stored as such, but text comes to the model with its spaces replaced.
    tokens = [token.replace(" ", SPACE) if not token.strip(" ") else token for token in tokens]
    # llama.cpp's converter marks these with -1,000; SentencePiece prefers them to every learned piece.
    scores = [0.0 if kind == USER_DEFINED else score for score, kind in zip(scores, kinds, strict=True)]
    vocab = {token: index for index, token in enumerate(tokens)}
    unknown = header.integer("tokenizer.ggml.unknown_token_id")
    model = models.BPE(
        vocab=vocab,
        merges=_implied_merges(vocab, scores),
        unk_token=None if unknown is None else tokens[unknown],
        fuse_unk=True,
        byte_fallback=True,
    )
    tokenizer = Tokenizer(model)
    prefix_space = header.flag("tokenizer.ggml.add_space_prefix", True)
    to_pieces = normalizers.Replace(" ", SPACE)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), to_pieces]) if prefix_space else to_pieces
    to_text = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*to_text, decoders.Strip(" ", 1, 0)] if prefix_space else to_text)
    _add_tokens(tokenizer, tokens, kinds)
    return tokenizer


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
    # Llama 3 takes a word that is in the vocabulary whole, even where merges would not lead to it.
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=pre == "llama-bpe"))
    tokenizer.pre_tokenizer = cut()
    tokenizer.decoder = decoders.ByteLevel()
    _add_tokens(tokenizer, tokens, kinds)
    return tokenizer


def _pair(merge: str) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    return left, right


def _gpt2_cut() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _smollm_cut() -> pre_tokenizers.PreTokenizer:
    """As GPT-2, with each digit by itself."""
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2_cut()])


def _llama3_cut() -> pre_tokenizers.PreTokenizer:
    split = pre_tokenizers.Split(Regex(_LLAMA3_SPLIT), behavior="isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


_CUTS: dict[str, Callable[[], pre_tokenizers.PreTokenizer]] = {
    "gpt-2": _gpt2_cut,
    "smollm": _smollm_cut,
    "llama-bpe": _llama3_cut,
}
_BUILDERS: dict[str, Callable[[GgufHeader, list[str], list[int]], Tokenizer]] = {
    "llama": _sentencepiece,
    "gpt2": _byte_level,
}


def _add_tokens(tokenizer: Tokenizer, tokens: list[str], kinds: list[int]) -> None:
    """Control tokens, which decoding hides, and user-defined ones: both are found whole in any text."""
    pairs = list(zip(tokens, kinds, strict=True))
    tokenizer.add_special_tokens([AddedToken(t, normalized=False, special=True) for t, k in pairs if k == CONTROL])
    tokenizer.add_tokens([AddedToken(t, normalized=False, special=False) for t, k in pairs if k == USER_DEFINED])
