"""Functions that return the shapes and dtypes of each op's outputs, for ``torch.compile`` and meta tensors.

The module ``fake/<op>.py`` defines the function ``<op>``. The function takes the op's arguments by name and ignores
arguments that do not affect the outputs. It never converts sizes to Python integers, because sizes may be symbols.
"""
