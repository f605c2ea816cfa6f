"""Logits of an int8 output matrix; see README.md."""

from pallas_kernels.int8_head.api import int8_head

__all__ = ["int8_head"]
