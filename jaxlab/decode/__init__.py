"""Decoding: autoregressive sampling now; diffusion decoders beside it."""
