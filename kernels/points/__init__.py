"""What kernels read of points: packed by class and rounded, in digits, on lattices, with biases."""
