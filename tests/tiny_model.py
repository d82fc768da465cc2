"""A model small enough to start in a moment: a config and a tokenizer of single bytes, without weights."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from tests.models.small_configs import small

BOS, EOS = 256, 257
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


def make_model(
    path: Path, *, chat_template: str | None = TEMPLATE, special_tokens: Sequence[str] = (), **config: Any
) -> Path:
    """A directory to start with `load_format` dummy, which makes weights up. `config` changes fields of its config."""
    path.mkdir()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token) for token in ("<bos>", "<eos>", *special_tokens)])
    tokenizer.save(str(path / "tokenizer.json"))
    settings = {"bos_token": "<bos>", "eos_token": "<eos>", "add_bos_token": True, "chat_template": chat_template}
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    fields = small("gemma3 text", vocab_size=258 + len(special_tokens), tie_word_embeddings=False, **config)
    (path / "config.json").write_text(json.dumps(fields))
    return path
