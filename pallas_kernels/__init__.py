"""Kernels of jaxlab: arrays in, arrays out. Imports nothing of jaxlab."""
