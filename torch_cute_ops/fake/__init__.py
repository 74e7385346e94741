"""Output shapes and dtypes of each op, and nothing else: what ``torch.compile`` and meta tensors see."""
