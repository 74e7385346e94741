"""Device code for any kernel: instructions, pipelines, launches, reductions, epilogues."""
