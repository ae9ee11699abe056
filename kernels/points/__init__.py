"""What kernels read of points: rounded, in digits and their losses, on lattices, with biases."""
