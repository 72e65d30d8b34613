"""A simulator of Metal kernels on the CPU: `python -m tests.sim build`."""
