"""A batch → logits, on one device."""
