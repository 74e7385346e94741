"""Command-line option that selects one part of a long task."""

import argparse


def part_of(text: str) -> tuple[int, int]:
    """Parse ``I/N``: return the index of the part and the number of parts."""
    number, _, count = text.partition("/")
    if not (number.isdigit() and count.isdigit() and 1 <= int(number) <= int(count)):
        raise argparse.ArgumentTypeError(f"{text!r} is not a part; expected I/N, such as 1/2")
    return int(number), int(count)
