"""What any kernel may need: instructions, fences, reductions, epilogues."""
