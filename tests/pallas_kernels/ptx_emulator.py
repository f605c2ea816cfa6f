"""Executes straight-line PTX of one warpgroup in numpy: what a compiler made, without a GPU.

Knows the instructions that decoding FP4 compiles to, nothing else: an unknown one raises. Copies by
TMA and waiting for them are skipped; the caller fills shared memory as they would.
"""

import re
from collections.abc import Mapping

import ml_dtypes
import numpy as np

THREADS, WARP = 128, 32
_SKIPPED = re.compile(r"(\.|//|@|bar\.|fence\.|mbarrier\.|cp\.async\.bulk|bra\.uni|elect\.sync)")
_LABEL = re.compile(r"\$?\w+:")
_TYPES = {"32": np.uint32, "64": np.uint64, "16": np.uint16}


def run(ptx: str, shared: np.ndarray, parameters: Mapping[str, int], memory: np.ndarray) -> None:
  """Runs the entry function of `ptx`, changing `memory` (uint8), where addresses point.

  Args:
    shared: uint8, dynamic shared memory.
    parameters: addresses in `memory` by number of the parameter.
  """
  _Warpgroup(shared, parameters, memory).run(ptx[ptx.index("$L__func_begin0:") :])


class _Warpgroup:
  """Registers are arrays over 128 threads."""

  def __init__(self, shared, parameters, memory):
    self.shared, self.memory, self.parameters = shared, memory, parameters
    self.registers = {"%tid.x": np.arange(THREADS, dtype=np.uint32)}

  def run(self, text):
    for line in text.splitlines():
      line = line.strip().rstrip(";")
      if not line or line in "{}" or _SKIPPED.match(line) or _LABEL.fullmatch(line):
        continue
      if line == "ret":
        return
      opcode, rest = line.split(maxsplit=1)
      operands = re.split(r",\s*(?![^{]*\})", rest)
      name, *suffixes = opcode.split(".")
      getattr(self, f"do_{name}")(suffixes, *operands)

  def value(self, operand, dtype=np.uint32):
    if operand in self.registers:
      return self.registers[operand].astype(dtype)
    if found := re.fullmatch(r"\w+_param_(\d+)", operand):
      return np.full(THREADS, self.parameters.get(found[1], 0), dtype)
    number = 0 if operand == "__dynamic_shmem__0" else int(operand)
    return np.full(THREADS, number & (2 ** (8 * np.dtype(dtype).itemsize) - 1), dtype)

  def address(self, operand):
    base, _, offset = operand.strip("[]").partition("+")
    return self.value(base, np.uint64).astype(np.int64) + int(offset or 0)

  def do_mov(self, suffixes, to, source):
    if to.startswith("{"):
      word = self.value(source)
      for i, half in enumerate(to.strip("{}").split(",")):
        self.registers[half.strip()] = (word >> np.uint32(16 * i)).astype(np.uint16)
    elif source.startswith("{"):
      low, high = (self.value(h.strip()) & 0xFFFF for h in source.strip("{}").split(","))
      self.registers[to] = low | (high << 16)
    else:
      self.registers[to] = self.value(source, _TYPES[suffixes[0][1:]])

  do_cvta = do_cvt = lambda self, suffixes, to, source: self.do_mov(["b64"], to, source)

  def do_shfl(self, suffixes, to, source, *_):
    first = self.value(source).reshape(-1, WARP)[:, :1]
    self.registers[to] = np.repeat(first, WARP)

  def do_setp(self, suffixes, to, a, b):
    assert suffixes[0] == "eq"
    self.registers[to] = self.value(a) == self.value(b)

  def do_bfe(self, suffixes, to, source, start, length):
    shifted = self.value(source) >> self.value(start)
    self.registers[to] = shifted & ((1 << int(length)) - 1)

  def binary(self, suffixes, to, a, b, function):
    if suffixes == ["pred"]:
      return
    dtype = _TYPES[suffixes[-1][1:]]
    self.registers[to] = function(self.value(a, dtype), self.value(b, dtype)).astype(dtype)

  do_and = lambda self, *args: self.binary(*args, np.bitwise_and)
  do_or = lambda self, *args: self.binary(*args, np.bitwise_or)
  do_xor = lambda self, *args: self.binary(*args, np.bitwise_xor)
  do_shl = lambda self, *args: self.binary(*args, np.left_shift)
  do_shr = lambda self, *args: self.binary(*args, np.right_shift)
  do_add = lambda self, *args: self.binary(*args, np.add)
  do_sub = lambda self, *args: self.binary(*args, np.subtract)

  def do_mul(self, suffixes, to, a, b):
    if suffixes == ["bf16x2"]:  # denormals are kept, by the PTX manual
      halves = [
        self.value(x).astype("<u4").view("<u2").view(ml_dtypes.bfloat16).astype(np.float32)
        for x in (a, b)
      ]
      product = (halves[0] * halves[1]).astype(ml_dtypes.bfloat16)
      self.registers[to] = product.view("<u4").copy()
    elif suffixes[0] == "wide":
      self.registers[to] = self.value(a, np.uint64) * self.value(b, np.uint64)
    else:
      self.registers[to] = self.value(a) * self.value(b)

  def do_ld(self, suffixes, to, source):
    space, *vector, kind = suffixes
    if space == "param":
      self.registers[to] = self.value(source.strip("[]"), np.uint64)
      return
    assert space == "shared"
    size, names = int(kind[1:]) // 8, [n.strip() for n in to.strip("{}").split(",")]
    for i, name in enumerate(names):
      at = self.address(source) + i * size
      parts = [self.shared[at + b].astype(np.uint32) << np.uint32(8 * b) for b in range(size)]
      self.registers[name] = np.bitwise_or.reduce(parts)

  def do_st(self, suffixes, to, source):
    at, word = self.address(to), self.value(source)
    for byte in range(4):
      self.memory[at + byte] = (word >> np.uint32(8 * byte)).astype(np.uint8)
