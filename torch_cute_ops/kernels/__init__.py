"""CuTe DSL device code, with the configurations that it is compiled for. It knows tensors and layouts, not ops."""
