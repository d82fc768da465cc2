"""Windowpane: an inference engine for hybrid-attention models. A layer pays only for the tokens it can still see."""

__version__ = "0.1.0"
