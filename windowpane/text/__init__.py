"""Text in and out: tokenizer, chat template, incremental detokenizer and stop rules. Torch-free."""

from windowpane.text.chat import ChatPrompt, ChatTemplate, chat_prompt
from windowpane.text.detokenizer import Detokenizer
from windowpane.text.stops import StopStrings
from windowpane.text.tokenizer import PromptTooLong, TextError, Tokenizer, load_tokenizer

__all__ = [
    "ChatPrompt",
    "ChatTemplate",
    "Detokenizer",
    "PromptTooLong",
    "StopStrings",
    "TextError",
    "Tokenizer",
    "chat_prompt",
    "load_tokenizer",
]
