"""Shape and dtype of each op's outputs, as ``torch.compile`` and meta tensors need them.

The module ``fake/<op>.py`` defines the function ``<op>``. The function takes the op's arguments by name and ignores
arguments that do not affect the outputs. It never converts sizes to Python integers, because sizes may be symbols.
"""
