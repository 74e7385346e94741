"""Shape and dtype of each op's outputs, and nothing else: what ``torch.compile`` and meta tensors see.

``fake/<op>.py`` has a function of that name. It takes the op's arguments by name, those that it needs, and makes no
Python integers of sizes, which may be symbols.
"""
