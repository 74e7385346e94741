"""Code shared by the tests: cases, models of GPU behaviour, and a second implementation of the specification."""
