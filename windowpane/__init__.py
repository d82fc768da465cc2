"""Windowpane: an inference engine for hybrid-attention models, in which each layer pays only for what it can still see."""

__version__ = "0.1.0"
