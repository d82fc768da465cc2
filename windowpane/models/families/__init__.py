"""One module per architecture family: `ARCHITECTURES` and `read(config, name)`; and what several of them share."""
