"""What a compiled program does on one device, read from its HLO text: traffic and buffers.

XLA's own cost analysis counts the body of a loop once and says nothing on a GPU. Here every result
outside of a fusion is written to device memory once and read by each of its users, loops count by
their trips, and what only a slice is taken of counts as the slice. A result that overwrites an
operand (dynamic-update-slice, scatter) counts as its update and is no new buffer. What starts in
one line and is done in another counts in the second.
"""

import collections
import dataclasses
import functools
import math
import re
from collections.abc import Iterator, Mapping

BITS = {
  "pred": 8, "s2": 2, "u2": 2, "s4": 4, "u4": 4, "s8": 8, "u8": 8, "s16": 16, "u16": 16, "s32": 32,
  "u32": 32, "s64": 64, "u64": 64, "f16": 16, "bf16": 16, "f32": 32, "f64": 64, "c64": 64,
  "c128": 128, "f4e2m1fn": 4, "f8e8m0fnu": 8, "f8e4m3": 8, "f8e4m3fn": 8, "f8e5m2": 8,
}  # fmt: skip
FREE = {
  "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "iota",
  "partition-id", "replica-id", "optimization-barrier", "opt-barrier", "async-update",
}  # fmt: skip
CONTROL = {"while", "conditional", "call", "async-start", "async-done"}  # their bodies count
SLICES = {"dynamic-slice", "slice", "gather"}  # read a part of their first operand
VIEWS = {"bitcast", "reshape", "copy"}  # inside a fusion: nothing is written
UPDATES = {"dynamic-update-slice": 1, "scatter": 2}  # overwrite a part of it: operand of the update
COLLECTIVES = (
  "all-gather",
  "all-reduce",
  "reduce-scatter",
  "all-to-all",
  "ragged-all-to-all",
  "collective-permute",
)

_LINE = re.compile(r"\s+(ROOT )?%(\S+) = (.*)")
_OPCODE = re.compile(r"(?:^|\s)([a-z][a-z0-9\-]*)\(")
_SHAPE = re.compile(r"\b([a-z]\w*)\[([\d,]*)\](?:\{([^}]*)\})?")
_CALLED = re.compile(r"(?:calls|body|to_apply|true_computation|false_computation)=%([\w.\-]+)")
_CONDITION = re.compile(r"condition=%([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_ALIAS = "output_to_operand_aliasing={{}: (0, {})}"  # a TPU's copy that only changes the layout
# A kernel that gets a stack [.., L, O, width] of packed weights and the index of a layer reads that
# layer alone, unseen by XLA. Known by the scope of its call, and by what weights are packed into.
STACK_KERNEL = re.compile(r"\bfp4_matmul:")
PACKED = {"u8", "s8", "u32", "s32", "f8e4m3fn", "f8e8m0fnu"}
ASYNC = '"async_collective_fusion_config"'  # of a collective that goes on beside other work
_OP_NAME = re.compile(r'op_name="([^"]*)"')
_DEVICES = re.compile(r"\b(?:num_partitions|replica_count)=(\d+)")


@dataclasses.dataclass(frozen=True)
class Instruction:
  """One line of HLO.

  shape: "bf16[28,3584]"; of a tuple, its largest part.
  bytes: of its result in device memory; `size` counts what is on the chip, too.
  attributes: what follows the operands; of a parameter and a constant, its number first.
  """

  name: str
  opcode: str
  shape: str
  bytes: float
  size: float
  operands: tuple[str, ...]
  attributes: str
  is_root: bool

  @property
  def source(self) -> str:
    """Where it comes from in the Python program, as JAX names scopes."""
    found = _OP_NAME.search(self.attributes)
    return found[1] if found else self.name


@dataclasses.dataclass(frozen=True)
class Result:
  """A buffer that the program writes: the instruction, how often, and whether it is a new one.

  Of a fusion with several results each has its own, with its shape and bytes.
  """

  instruction: Instruction
  times: float
  in_place: bool


@dataclasses.dataclass(frozen=True)
class Analysis:
  """Of one run of the program, on one device.

  bytes: read from and written to device memory.
  collectives: {kind: bytes that a device sends}, for rings.
  results: every buffer written, largest first.
  """

  bytes: float
  collectives: Mapping[str, float]
  results: tuple[Result, ...]


Computation = Mapping[str, Instruction]


def analyse(text: str, trips: float = 1.0) -> Analysis:
  """Reads the text of an optimised module (`compiled.as_text()`).

  trips: of loops whose number of trips the compiler does not know, outside of each other.
  """
  module = _Module(text)
  traffic, sent = 0.0, collections.Counter()
  results = []
  for instruction, inside, times in module.executed(module.entry, 1.0, trips):
    traffic += times * module.traffic(instruction, inside)
    for kind, size in module.collectives(instruction, inside):
      sent[kind] += times * size
    for result, update in module.written(instruction, inside):
      results.append(Result(result, times, update is not None))
  results.sort(key=lambda result: -result.instruction.bytes)
  return Analysis(traffic, dict(sent), tuple(results))


class _Module:
  """Computations by name, and what their instructions cost."""

  def __init__(self, text: str):
    self.computations: dict[str, Computation] = {}
    self.devices = math.prod(map(int, _DEVICES.findall(text.partition("\n")[0])))
    current = None
    for line in text.splitlines():
      if header := re.match(r"(ENTRY )?%(\S+) \(", line):
        current = self.computations.setdefault(header[2], {})
        if header[1]:
          self.entry = header[2]
      elif current is not None and (found := _LINE.match(line)):
        current[found[2]] = _parse(found[2], found[3], bool(found[1]))

  def executed(
    self, name: str, times: float, trips: float = 1.0
  ) -> Iterator[tuple[Instruction, Computation, float]]:
    """(instruction, its computation, how often it runs), of everything outside of fusions."""
    inside = self.computations[name]
    for instruction in inside.values():
      yield instruction, inside, times
      for called, known in self._called(instruction):
        if known is None:
          yield from self.executed(called, times * trips)
        else:
          yield from self.executed(called, times * known, trips)

  def _called(self, instruction: Instruction) -> Iterator[tuple[str, float | None]]:
    """(a computation that it runs, how often; None where that is not known)."""
    if instruction.opcode == "while":
      yield _CALLED.search(instruction.attributes)[1], self._trips(instruction)
    elif instruction.opcode == "conditional":  # the branch that costs the most
      branches = _CALLED.findall(instruction.attributes)
      if listed := _BRANCHES.search(instruction.attributes):
        branches += re.findall(r"%([\w.\-]+)", listed[1])
      yield max(branches, key=self._bytes_of), 1.0
    elif instruction.opcode in ("call", "async-start"):
      if called := _CALLED.search(instruction.attributes):
        yield called[1], 1.0

  def _bytes_of(self, name: str) -> float:
    return sum((t * self.traffic(i, inside) for i, inside, t in self.executed(name, 1.0)), 0.0)

  def _trips(self, loop: Instruction) -> float | None:
    """As the compiler says; on a TPU it does not, but a scan's condition is `index < length`."""
    if known := _TRIPS.search(loop.attributes):
      return float(known[1])
    condition = self.computations[_CONDITION.search(loop.attributes)[1]]
    test, names = _root(condition), {}
    if test.opcode == "fusion":
      inside = self._inside(test)
      names = {i.name: test.operands[_index(i)] for i in inside.values() if i.opcode == "parameter"}
      condition, test = condition | inside, _root(inside)
    if test.opcode != "compare" or "direction=LT" not in test.attributes:
      return None
    limit = condition[names.get(test.operands[1], test.operands[1])]
    whole = limit.opcode == "constant" and re.match(r"\d+(?=,|$)", limit.attributes)
    return float(whole[0]) if whole else None

  def traffic(self, instruction: Instruction, inside: Computation) -> float:
    """Bytes that one run of the instruction reads and writes."""
    if instruction.opcode in FREE | CONTROL or instruction.opcode.endswith("-start"):
      return 0.0
    if instruction.opcode.endswith("-done"):
      instruction = _joined(instruction, inside)
    opcode = instruction.opcode
    read = [inside[name] for name in instruction.operands if name in inside]
    if opcode == "fusion":
      return self._fused(instruction, inside, read)
    if opcode == "custom-call" and STACK_KERNEL.search(instruction.source):
      return sum(map(_of_a_layer, read), instruction.bytes)
    if opcode in SLICES:
      return min(instruction.size, read[0].bytes) + instruction.bytes
    if opcode in UPDATES:
      update = read[UPDATES[opcode]]
      return update.bytes + (update.size if instruction.bytes else 0.0)
    return sum((operand.bytes for operand in read), instruction.bytes)

  def _fused(self, fusion: Instruction, inside: Computation, read: list[Instruction]) -> float:
    reads = (self._read(fusion, n, operand.bytes) for n, operand in enumerate(read))
    writes = (
      result.bytes if update is None else update.size
      for result, update in self.written(fusion, inside)
    )
    return sum(writes, sum(reads, 0.0))

  def _read(self, fusion: Instruction, position: int, whole: float) -> float:
    """Of an operand in device memory: the slices that a fusion takes of it, or all."""
    inside = self._inside(fusion)

    def read(name: str) -> float:
      total = 0.0
      for user in inside.values():
        for at in (n for n, operand in enumerate(user.operands) if operand == name):
          if not user.is_root and (user.opcode in VIEWS or _ALIAS in user.attributes):
            total += read(user.name)
          elif user.opcode in SLICES and at == 0:
            total += user.size
          elif user.opcode == "tuple" or user.opcode in UPDATES and at == 0:
            continue  # handed on, or overwritten: not read
          elif user.opcode == "fusion":
            total += self._read(user, at, whole)
          else:
            total += whole
      return total

    numbered = (i for i in inside.values() if i.opcode == "parameter" and _index(i) == position)
    return min(sum((read(parameter.name) for parameter in numbered), 0.0), whole)

  def written(
    self, instruction: Instruction, inside: Computation
  ) -> list[tuple[Instruction, Instruction | None]]:
    """(a result in device memory, the update where it only overwrites a part of an operand)."""
    opcode = instruction.opcode
    if opcode in FREE | CONTROL or opcode.endswith("-start") or not instruction.bytes:
      return []
    if opcode != "fusion":
      return [(instruction, self._update(instruction, inside))]
    inside = self._inside(instruction)
    root = _root(inside)
    if root.opcode != "tuple":
      return [(instruction, self._update(root, inside))]
    made = [inside[name] for name in root.operands]
    made = [x for x in made if x.opcode != "parameter" and not _began_before(x, inside)]
    results = [(result, self._update(result, inside)) for result in made]
    like = lambda x: dataclasses.replace(instruction, shape=x.shape, bytes=x.bytes, size=x.size)
    return [(like(result), update) for result, update in results if result.bytes]

  def _update(self, result: Instruction, inside: Computation) -> Instruction | None:
    while result.opcode == "bitcast":
      result = inside[result.operands[0]]
    if result.opcode == "fusion":
      inside = self._inside(result)
      return self._update(_root(inside), inside)
    return inside[result.operands[UPDATES[result.opcode]]] if result.opcode in UPDATES else None

  def _inside(self, fusion: Instruction) -> Computation:
    return self.computations[_CALLED.search(fusion.attributes)[1]]

  def collectives(
    self, instruction: Instruction, inside: Computation
  ) -> Iterator[tuple[str, float]]:
    """(kind, bytes sent by a device) of a collective, also of those that a fusion hides."""
    found = [instruction]
    if instruction.opcode == "fusion":
      inside = self._inside(instruction)
      found = inside.values()
    for one in found:
      kind = one.opcode.removesuffix("-start")
      if kind in COLLECTIVES and not _began_before(one, inside):
        if instruction.opcode == "fusion" and kind == "all-reduce":
          # A TPU's reduce-scatter is a fusion of a sum with the slice that the device keeps.
          sliced = any(other.opcode == "dynamic-slice" for other in found)
          kind = "reduce-scatter" if sliced else kind
        size = sum((inside[name].size for name in one.operands), 0.0)
        yield kind, _sent(kind, size, _group(one.attributes, self.devices))


def _began_before(collective: Instruction, inside: Computation) -> bool:
  """Whether a fusion only continues a collective: a TPU spreads one over the fusions beside it."""
  starts = any("AsyncCollectiveStart" in other.attributes for other in inside.values())
  return ASYNC in collective.attributes and not starts


def _of_a_layer(operand: Instruction) -> float:
  """Bytes that a kernel reads of a stack of packed weights, or of another operand."""
  dtype, _, dims = operand.shape.removesuffix("]").partition("[")
  *stack, _, _ = dims.split(",") if dims.count(",") >= 2 else ("1", "", "")
  return operand.bytes / int(stack[-1]) if dtype in PACKED else operand.bytes


def _root(inside: Computation) -> Instruction:
  return next(i for i in inside.values() if i.is_root)


def _joined(done: Instruction, inside: Computation) -> Instruction:
  """What starts in one line and is done in another, as one: the operands and the result."""
  start = inside[done.operands[0]]
  if not start.opcode.endswith("-start"):  # before this loop, or in its last round
    return dataclasses.replace(done, operands=())
  return dataclasses.replace(
    done, opcode=done.opcode.removesuffix("-done"), operands=start.operands,
    attributes=start.attributes,
  )  # fmt: skip


def _parse(name: str, rest: str, is_root: bool) -> Instruction:
  opcode = _OPCODE.search(rest)
  depth, end = 1, opcode.end()
  while depth and end < len(rest):
    depth += (rest[end] == "(") - (rest[end] == ")")
    end += 1
  shapes = _SHAPE.findall(rest[: opcode.start()])
  sizes = [_bytes(dtype, dims) for dtype, dims, _ in shapes]
  largest = max(range(len(shapes)), key=sizes.__getitem__, default=None)
  operands = rest[opcode.end() : end - 1]
  return Instruction(
    name=name,
    opcode=opcode[1],
    shape="" if largest is None else f"{shapes[largest][0]}[{shapes[largest][1]}]",
    # S(1) and the like in a layout is memory on the chip.
    bytes=sum((n for n, shape in zip(sizes, shapes, strict=True) if "S(" not in shape[2]), 0.0),
    size=sum(sizes, 0.0),
    operands=tuple(re.findall(r"%([\w.\-]+)", operands)),
    attributes=f"{operands if opcode[1] in ('parameter', 'constant') else ''}{rest[end:]}",
    is_root=is_root,
  )


def _index(parameter: Instruction) -> int:
  return int(re.match(r"\d+", parameter.attributes)[0])


@functools.cache
def _bytes(dtype: str, dims: str) -> float:
  return BITS.get(dtype, 0) / 8 * math.prod(int(size) for size in dims.split(",") if size)


def _sent(kind: str, size: float, group: int) -> float:
  """Bytes that a device of a group sends in a ring; `size` is of what it has before."""
  match kind:
    case "all-gather":
      return (group - 1) * size
    case "all-reduce":
      return 2 * (group - 1) / group * size
    case "collective-permute":
      return size
    case _:
      return (group - 1) / group * size


def _group(attributes: str, devices: int) -> int:
  """Devices that take part together: [groups,size], {{0,1},...}, axes of a mesh; or all."""
  if found := re.search(r"replica_groups=\[\d+,(\d+)\]", attributes):
    return int(found[1])
  if found := re.search(r"replica_groups=\{\{([\d,]*)\}", attributes):
    return len(found[1].split(","))
  if found := re.search(r"replica_groups=mesh\[([^\]]*)\][^{]*\{([^}]*)\}", attributes):
    sizes = dict(re.findall(r"('\w+')=(\d+)", found[1]))
    axes = re.findall(r"('\w+')(?::\(\d+\)(\d+))?", found[2])  # a part of an axis is (before)size
    return math.prod(int(part or sizes[axis]) for axis, part in axes)
  return devices
