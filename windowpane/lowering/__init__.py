"""Model descriptions turned into callables: `reference`, `cpu` and `gpu`."""
