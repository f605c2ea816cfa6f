"""Speed as a ratio against a named baseline, measured in one process by interleaved pairs."""
