"""Weights to 4 bits: formats and scale rules, FP4 (NVFP4, MXFP4) and NF4."""
