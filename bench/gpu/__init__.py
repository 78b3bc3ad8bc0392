"""Programs for NVIDIA GPUs without a GPU: compiled, counted, and predicted."""
