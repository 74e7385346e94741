"""Sample inputs and error inputs, one module an op: ``sample_inputs(device)`` and ``error_inputs(device)``."""
