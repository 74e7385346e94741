"""Device code that finds the rows, tokens and columns of each expert."""
