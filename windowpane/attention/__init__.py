"""Attention: past from pages, present from activations."""
