"""KV memory without torch: what layers keep, how it is laid out, what fits, and who holds which bytes."""
