"""Layouts of FP4 operands, and device code that copies, decodes, encodes and multiplies them."""
