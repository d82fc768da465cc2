"""Which replica should take a request: what each publishes about what it remembers, and who chooses by it."""
