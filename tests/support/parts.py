"""Command-line option that selects a part of a long task."""

import argparse


def part_of(text: str) -> tuple[int, int]:
    """Return the number of the part and the number of parts from ``I/N``."""
    number, _, count = text.partition("/")
    if not (number.isdigit() and count.isdigit() and 1 <= int(number) <= int(count)):
        raise argparse.ArgumentTypeError(f"{text!r} is not a part; expected I/N, such as 1/2")
    return int(number), int(count)
