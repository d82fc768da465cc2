"""`windowpane doctor`: what a vLLM start-up log says about KV memory, what it means, and what would change it."""
