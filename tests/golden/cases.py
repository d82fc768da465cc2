"""What the embedded models are asked, and where the recorded answers lie."""

from __future__ import annotations

from pathlib import Path

NEW_TOKENS = 48

_STORY = (
    "The lighthouse keeper wrote down the weather every morning, and every evening he read it aloud to the sea. "
    "On the first day there was fog. On the second day there was wind from the west, and a ship with grey sails. "
    "On the third day the ship was gone, the fog had come back, and the lamp needed new oil. "
)

PROMPTS: dict[str, tuple[str, ...]] = {
    "gemma-3-270m": (
        "The capital of France is",
        "def fibonacci(n):\n",
        _STORY * 9 + "On the fourth day",  # longer than a window
    ),
    "smollm2-135m-instruct": (
        "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n",
        "<|im_start|>user\nWrite one sentence about the sea.<|im_end|>\n<|im_start|>assistant\n",
        "Once upon a time",
    ),
}


def golden_path(model: str) -> Path:
    return Path(__file__).with_name(f"{model}.json")
