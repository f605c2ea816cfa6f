"""x @ W for W in NVFP4 or MXFP4; see README.md for shapes and what runs where."""

from pallas_kernels.fp4_gemm.api import fp4_matmul

__all__ = ["fp4_matmul"]
