"""Programs for TPUs without a TPU: compiled, counted, and predicted."""
