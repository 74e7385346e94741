"""Which rows, tokens and columns belong to which expert."""
