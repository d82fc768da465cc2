"""Text to token ids and back, from a Hugging Face directory or a GGUF file.

Encoding is the `tokenizers` library's. Decoding is done here, in bytes: every token stands for a fixed string of bytes,
so that a text is the tokens' bytes joined and read as UTF-8, and a stream can be cut at any token (see `detokenizer`).
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from windowpane.models.config import ModelError
from windowpane.models.gguf import GgufHeader, is_gguf, read_header
from windowpane.text.pattern import choice_pattern

if TYPE_CHECKING:
    import tokenizers

# Tokens that end a turn. GGUF files have no generation_config.json to list them.
_TURN_ENDS = ("<end_of_turn>", "<|im_end|>", "<|eot_id|>", "<|eot|>", "<|eom|>", "<|end|>")
# gpt-oss: these end an answer, while `<|end|>` ends one of its messages.
_HARMONY_ENDS = ("<|return|>", "<|call|>")

PROBED_CHARACTERS = 2**16
CUT_TOKENS = 64  # a cut makes more tokens of a text, but hardly so many
USUAL_CHARACTERS_PER_TOKEN = 8  # most texts have fewer


class TextError(ValueError):
    """A tokenizer, chat template or stop rule cannot be used; the message says why and what works instead."""


class PromptTooLong(TextError):
    """A text surely has more tokens than it may; `at_least` says how many at the least."""

    def __init__(self, at_least: int) -> None:
        super().__init__(f"the prompt has at least {at_least} tokens")
        self.at_least = at_least


@dataclass(frozen=True, slots=True)
class Encoding:
    """Token ids, and where in the text each of them begins."""

    ids: list[int]
    starts: list[int]


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """What a tokenizer comes with besides its vocabulary. `special_tokens` are texts by role, such as `bos_token`.

    `sampling_defaults` are those of generation_config.json, by the API's names.
    """

    source: str
    special_tokens: Mapping[str, str]
    stop_ids: frozenset[int]
    chat_template: str | None
    sampling_defaults: Mapping[str, float] = field(default_factory=dict)


def load_tokenizer(source: str | Path, *, lazy: bool = False) -> Tokenizer:
    """The tokenizer of a Hugging Face directory (with a tokenizer.json) or a GGUF file; raises TextError.

    A `lazy` one takes the seconds that a large GGUF vocabulary needs only when a second or a long text comes.
    """
    path = Path(source)
    try:
        return _from_gguf(read_header(path), lazy) if is_gguf(path) else _from_directory(path)
    except ModelError as error:
        raise TextError(str(error)) from None


class Tokenizer:
    """Encode and decode. `stop_ids` are all tokens that end a generation; `files` holds what chat templates need."""

    def __init__(self, backend: tokenizers.Tokenizer, files: TokenizerFiles) -> None:
        self.files = files
        self._backend = backend
        self._spelling = _Spelling(json.loads(backend.decoder.__getstate__()) if backend.decoder else None)
        self._added = backend.get_added_tokens_decoder()
        self._bytes: dict[int, bytes] = {}
        self.bos_id = self._special_id("bos_token")
        self.eos_id = self._special_id("eos_token")
        self.stop_ids = files.stop_ids

    @property
    def vocab_size(self) -> int:
        """How many ids there are; a model's embedding may be padded beyond it."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    @property
    def id_count(self) -> int:
        """One more than the highest id: a vocabulary may leave some out."""
        return max(self.vocab_size, *(i + 1 for i in self._added)) if self._added else self.vocab_size

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`, with BOS in front where the model wants it.

        Special tokens written out in `text` are found either way. A chat template writes its own BOS, so its result is
        encoded without `add_special_tokens`.
        """
        return _encode(self._backend, text, add_special_tokens)

    def encode_text(self, text: str) -> list[int]:
        """Token ids of `text` as nothing but text: what is spelled like a special token is spelled out."""
        return _encode(self._plain_backend, text, False)

    def encode_with_offsets(self, text: str, as_text: bool = False) -> Encoding:
        """As `encode` without the tokens that models want around text, or as `encode_text`."""
        backend = self._plain_backend if as_text else self._backend
        encoding = backend.encode_batch([text], add_special_tokens=False)[0]
        return Encoding(encoding.ids, [start for start, _ in encoding.offsets])

    @cached_property
    def special_pattern(self) -> re.Pattern[str]:
        """Finds what is spelled like a special token: the longest one at a place."""
        spelled = [token.content for token in self._added.values() if token.special and token.content]
        return re.compile(choice_pattern(spelled) if spelled else r"(?!)")

    def split_special(self, text: str) -> Iterator[tuple[int, str, int | None]]:
        """Parts of `text` with where they begin: special tokens with their ids, and what stands between them."""
        at = 0
        for found in self.special_pattern.finditer(text):
            yield at, text[at : found.start()], None
            yield found.start(), found.group(), self.token_id(found.group())
            at = found.end()
        yield at, text[at:], None

    @cached_property
    def longest_token_bytes(self) -> int:
        return max(len(self.token_bytes(i, False)) for i in range(self.id_count))

    @cached_property
    def _plain_backend(self) -> tokenizers.Tokenizer:
        """Shares the model, and so costs next to nothing. Setting the flag on the backend itself would need a lock."""
        import tokenizers

        plain = tokenizers.Tokenizer(self._backend.model)
        plain.normalizer, plain.pre_tokenizer = self._backend.normalizer, self._backend.pre_tokenizer
        plain.add_tokens([token for _, token in sorted(self._added.items())])
        if plain.get_added_tokens_decoder().keys() != self._added.keys():  # the file numbers them otherwise
            plain = tokenizers.Tokenizer.from_str(self._backend.to_str())
        plain.encode_special_tokens = True
        return plain

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """The text of `ids`, from its beginning; bytes that are no UTF-8 become U+FFFD."""
        text = b"".join(self.token_bytes(i, skip_special_tokens) for i in ids).decode("utf-8", errors="replace")
        return text.removeprefix(" ") if self._spelling.prefix_space else text

    def token_bytes(self, token_id: int, skip_special_tokens: bool = True) -> bytes:
        """What one token stands for; nothing for special tokens that are skipped and for ids without a token."""
        added = self._added.get(token_id)
        if added is not None and added.special:
            return b"" if skip_special_tokens else added.content.encode()
        known = self._bytes.get(token_id)
        if known is None:
            piece = self._backend.id_to_token(token_id)
            # An added token is text as it stands, whatever the vocabulary's spelling.
            known = b"" if piece is None else self._spelling.to_bytes(piece, added is not None)
            self._bytes[token_id] = known
        return known

    def token_id(self, token: str) -> int | None:
        """The id of a token by its exact spelling, such as `<end_of_turn>`; None where there is none."""
        index: int | None = self._backend.token_to_id(token)
        return index

    def _special_id(self, role: str) -> int | None:
        token = self.files.special_tokens.get(role)
        return None if token is None else self.token_id(token)


def check_length(tokenizer: Tokenizer, text: str, max_tokens: int | None) -> None:
    """Raise PromptTooLong for a text that surely has more than `max_tokens`, without tokenizing all of it.

    No token is longer than the longest. A text within that bound that is still large is tokenized piece by piece until
    there are too many, some allowed for where it was cut.
    """
    if max_tokens is None or len(text) <= max_tokens:
        return
    size_bytes = len(text.encode(errors="replace"))
    if size_bytes > max_tokens * tokenizer.longest_token_bytes:
        raise PromptTooLong(-(-size_bytes // tokenizer.longest_token_bytes))
    if len(text) <= PROBED_CHARACTERS + max_tokens * USUAL_CHARACTERS_PER_TOKEN:
        return
    tokens = 0
    for start in range(0, len(text), PROBED_CHARACTERS):
        tokens += len(tokenizer.encode(text[start : start + PROBED_CHARACTERS], add_special_tokens=False)) - CUT_TOKENS
        if tokens > max_tokens:
            raise PromptTooLong(tokens)


def _encode(backend: tokenizers.Tokenizer, text: str, add_special_tokens: bool) -> list[int]:
    """`encode` holds the interpreter's lock all along, and a megabyte takes a second; `encode_batch` lets go of it."""
    ids: list[int] = backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
    return ids


class _Spelling:
    """How a vocabulary writes bytes, read off the decoder that comes with it."""

    def __init__(self, decoder: dict[str, Any] | None) -> None:
        steps = [] if decoder is None else decoder.get("decoders", [decoder])
        kinds = [step["type"] for step in steps]
        self.byte_level = "ByteLevel" in kinds
        self.byte_fallback = "ByteFallback" in kinds
        replacements = [(s["pattern"].get("String", ""), s["content"]) for s in steps if s["type"] == "Replace"]
        metaspace = [step for step in steps if step["type"] == "Metaspace"]
        replacements += [(step["replacement"], " ") for step in metaspace]
        self.replacements = replacements
        # Written in front of every text when encoding, and so taken off again.
        self.prefix_space = any(s["type"] == "Strip" and s["start"] for s in steps) or any(
            step.get("prepend_scheme", "always") != "never" for step in metaspace
        )
        unknown = set(kinds) - {"ByteLevel", "ByteFallback", "Replace", "Metaspace", "Fuse", "Strip"}
        if unknown or not steps:
            raise TextError(
                f"the tokenizer's decoder {', '.join(sorted(unknown)) or 'is missing'} is not known; byte-level and "
                "SentencePiece tokenizers are"
            )

    def to_bytes(self, piece: str, added: bool) -> bytes:
        if self.byte_level:
            return piece.encode() if added else _byte_level_bytes(piece)
        if self.byte_fallback and len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
            return bytes([int(piece[3:5], 16)])
        for pattern, content in self.replacements:
            piece = piece.replace(pattern, content)
        return piece.encode()


def _byte_level_bytes(piece: str) -> bytes:
    alphabet = _byte_alphabet()
    # A piece outside the alphabet is text that was put into the vocabulary as it is.
    return bytes(alphabet[c] for c in piece) if all(c in alphabet for c in piece) else piece.encode()


@cache
def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-ins for the 256 bytes: printable Latin-1 stands for itself, the rest follows U+0100."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


def _from_gguf(header: GgufHeader, lazy: bool) -> Tokenizer:
    from windowpane.text.gguf_tokenizer import LazySentencePiece, SentencePiece, adds_bos, build

    tokens = header.texts("tokenizer.ggml.tokens")
    roles = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    ids = {role: header.integer(f"tokenizer.ggml.{name}_token_id") for role, name in roles.items()}
    special = {role: tokens[index] for role, index in ids.items() if index is not None and index < len(tokens)}

    def finish(backend: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
        if adds_bos(header):
            _put_bos_in_front(backend, special.get("bos_token"), header.path.name)
        return backend

    backend: Any = None
    if lazy and header.text("tokenizer.ggml.model") == "llama":
        backend = LazySentencePiece(SentencePiece(header), finish)
    else:
        backend = finish(build(header))
    stops = {header.integer(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")}
    stops |= {backend.token_to_id(token) for token in _TURN_ENDS}
    files = TokenizerFiles(
        source=header.path.name,
        special_tokens=special,
        stop_ids=_stop_ids(backend, stops),
        chat_template=header.text("tokenizer.chat_template"),
    )
    return Tokenizer(backend, files)


def _from_directory(path: Path) -> Tokenizer:
    import tokenizers

    if not (path / "tokenizer.json").is_file():
        raise TextError(
            f"{path} holds no tokenizer.json; save the tokenizer in that form, or use a GGUF file, which holds its own"
        )
    try:
        backend = tokenizers.Tokenizer.from_file(str(path / "tokenizer.json"))
    except Exception as error:  # the library raises nothing narrower
        raise TextError(f"cannot read {path / 'tokenizer.json'}: {error}") from None
    config = _read_json(path / "tokenizer_config.json")
    special = {role: text for role in config if role.endswith("_token") and (text := _token_text(config[role]))}
    if config.get("add_bos_token") is True:
        _put_bos_in_front(backend, special.get("bos_token"), str(path))
    model, generation = _read_json(path / "config.json"), _read_json(path / "generation_config.json")
    nested: dict[str, Any] = model["text_config"] if isinstance(model.get("text_config"), dict) else {}
    stops: list[Any] = []
    for named in (_first("eos_token_id", model, nested), generation.get("eos_token_id")):
        stops += named if isinstance(named, list) else [named]
    stops += [backend.token_to_id(special["eos_token"])] if "eos_token" in special else []
    files = TokenizerFiles(
        source=str(path),
        special_tokens=special,
        stop_ids=_stop_ids(backend, stops, _first("vocab_size", nested, model)),
        chat_template=_chat_template(path, config),
        sampling_defaults=_sampling_defaults(path / "generation_config.json"),
    )
    return Tokenizer(backend, files)


def _stop_ids(backend: tokenizers.Tokenizer, named: Iterable[Any], vocab_size: Any = None) -> frozenset[int]:
    """The stop tokens that files name, less what does not end an answer of gpt-oss, and what else does.

    Ids beyond the model's vocabulary, where it is known, are left out: no step can sample them.
    """
    end = vocab_size if isinstance(vocab_size, int) else sys.maxsize
    stops = {stop for stop in named if isinstance(stop, int) and 0 <= stop < end}
    harmony = {stop for token in _HARMONY_ENDS if (stop := backend.token_to_id(token)) is not None}
    if len(harmony) == len(_HARMONY_ENDS):
        stops = (stops | harmony) - {backend.token_to_id("<|end|>")}
    return frozenset(stops)


def _first(key: str, *parts: Mapping[str, Any]) -> Any:
    """The value of the first part of a config that has one; null counts as missing."""
    return next((part[key] for part in parts if part.get(key) is not None), None)


def _put_bos_in_front(backend: tokenizers.Tokenizer, bos: str | None, source: str) -> None:
    """Make encoding begin with BOS, unless it does already."""
    from tokenizers.processors import TemplateProcessing

    index = None if bos is None else backend.token_to_id(bos)
    if bos is None or index is None:
        raise TextError(f"the tokenizer of {source} wants BOS in front of text, but names no BOS token")
    if backend.encode("", add_special_tokens=True).ids[:1] != [index]:
        backend.post_processor = TemplateProcessing(
            single=[bos, "$A"], pair=[bos, "$A", f"{bos}:1", "$B:1"], special_tokens=[(bos, index)]
        )


SAMPLING_DEFAULTS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


def _sampling_defaults(path: Path) -> dict[str, float]:
    """How its makers want a model sampled."""
    config = _read_json(path)
    defaults = {name: config[name] for name in SAMPLING_DEFAULTS if isinstance(config.get(name), int | float)}
    if "top_k" in defaults:
        defaults["top_k"] = int(defaults["top_k"])
    return defaults


def _chat_template(path: Path, config: Mapping[str, Any]) -> str | None:
    """A file of its own wins; in tokenizer_config.json there may be several, of which `default` is meant."""
    own_file = path / "chat_template.jinja"
    if own_file.is_file():
        return own_file.read_text("utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):
        template = {entry["name"]: entry["template"] for entry in template}.get("default")
    return template


def _token_text(token: object) -> str | None:
    """Configs write a token as its text, or as an object that holds it."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        fields = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise TextError(f"cannot read {path}: {error}") from None
    if not isinstance(fields, dict):
        raise TextError(f"{path} must hold a JSON object, not {type(fields).__name__}")
    return fields
