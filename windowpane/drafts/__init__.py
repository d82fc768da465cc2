"""Speculative decoding: who drafts tokens, and how many of them a step verifies."""
