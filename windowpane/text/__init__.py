"""Text in and out: tokenizer, chat template, incremental detokenizer and stop rules. Torch-free."""

from windowpane.text.chat import ChatTemplate, message_ends
from windowpane.text.detokenizer import Detokenizer
from windowpane.text.stops import StopStrings
from windowpane.text.tokenizer import TextError, Tokenizer, load_tokenizer

__all__ = ["ChatTemplate", "Detokenizer", "StopStrings", "TextError", "Tokenizer", "load_tokenizer", "message_ends"]
