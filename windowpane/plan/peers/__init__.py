"""Other engines' KV memory formulas: what they would reserve and report for the same flags."""
