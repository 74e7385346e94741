"""Code shared by the tests: cases, models of GPU behaviour, and the independent specification."""
