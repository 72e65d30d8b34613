"""`lily selftest`: every kernel of a device against the CPU, on the user's own machine."""
