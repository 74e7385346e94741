"""Device code that any kernel may use: PTX instructions, pipelines, launches, reductions and epilogues."""
