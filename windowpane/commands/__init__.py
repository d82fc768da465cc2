"""Commands that need no torch, a module each; `windowpane.cli` puts them together with those that run models."""
