"""What tests share: cases, models of what runs on a GPU, and the independent specification."""
