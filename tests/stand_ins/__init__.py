"""What stands in for a GPU and its libraries in tests: it works on the CPU, and has their rules."""
