"""The command line: one module per command; flags are declared once, in `flags`."""
