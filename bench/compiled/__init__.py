"""Programs of the decoding loop for chips that are not there: compiled, counted, and predicted."""
