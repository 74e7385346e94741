"""Device code that chooses experts, places rows, and finds the rows, tokens and columns of each expert."""
