"""Models in torch, built from the torch-free specs in `windowpane.models`."""
