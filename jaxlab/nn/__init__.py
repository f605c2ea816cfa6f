"""Linen building blocks and the weight seam; knows nothing of models, quantisers or training."""
