"""Device code that chooses experts, assigns (token, expert) pairs to rows, and finds each expert's rows, tokens and
columns."""
