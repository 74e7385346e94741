"""CuTe DSL kernels, and the configurations that they are compiled for. Kernels work on tensors and layouts. Kernels do
not import ops."""
