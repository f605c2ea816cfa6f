"""One mesh for every model: its axes, the rules that place parameters on it, several processes."""
