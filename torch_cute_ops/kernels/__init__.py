"""CuTe DSL device code, with the configurations that it is compiled for. Kernels know tensors and layouts, not ops."""
