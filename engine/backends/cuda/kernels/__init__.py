"""GPU kernels and their torch references: one idea per file, same signature, one test over both."""
