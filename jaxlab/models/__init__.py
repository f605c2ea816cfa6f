"""Architectures only, one file a family; checkpoint names live in `jaxlab.io`."""
