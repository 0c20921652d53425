"""GPU kernels and their torch twins: one idea per file, same signature, one test over both."""
