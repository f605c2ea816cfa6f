// What XLA calls: checks operands, chooses the instruction set, spreads work over XLA's threads.
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <memory>
#include <new>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "types.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace jaxlab {

// --- memory of a thread

namespace {

struct Buffer {
  char* data = nullptr;
  size_t size = 0;
  ~Buffer() { std::free(data); }
  void* Get(size_t bytes) {
    if (bytes > size) {
      std::free(data);
      size = 0;  // should the next line find no memory, the next call must not believe it did
      const size_t whole = (bytes + bytes / 4 + 4095) / 4096 * 4096;
      data = static_cast<char*>(std::aligned_alloc(64, whole));
      if (data == nullptr) throw std::bad_alloc();
      size = whole;
    }
    return data;
  }
};

constexpr size_t kKept = 4 << 20;  // larger buffers are given back after each call

thread_local Buffer scratch;
thread_local Buffer rows_kept;

}  // namespace

float* Scratch(int64_t floats) { return static_cast<float*>(scratch.Get(floats * sizeof(float))); }

namespace {

// --- instruction sets

struct Isa {
  const char* name;
  const Kernels* kernels;
  bool here;
};

const std::vector<Isa>& Isas() {  // the best last
  static const std::vector<Isa> isas = [] {
    std::vector<Isa> found = {{"portable", &kPortable, true}};
#if defined(__x86_64__)
    __builtin_cpu_init();
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                      __builtin_cpu_supports("f16c");
    const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") &&
                        __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
                        __builtin_cpu_supports("avx512dq");
    found.push_back({"avx2", &kAvx2, avx2});
    found.push_back({"avx512", &kAvx512, avx512});
    found.push_back(
        {"avx512_vnni", &kAvx512Vnni, avx512 && bool(__builtin_cpu_supports("avx512vnni"))});
#endif
    return found;
  }();
  return isas;
}

const Kernels* Find(std::string_view name) {  // "" for the best one
  const Kernels* found = nullptr;
  for (const Isa& isa : Isas()) {
    if (isa.here && (name.empty() || name == isa.name)) found = isa.kernels;
  }
  return found;
}

// --- threads

// fn(task) for every task in [0, tasks), by this thread and those of the pool that come in time. A
// thread that comes late finds no task left and does not touch `fn`. Throws std::bad_alloc, on this
// thread and once all are done, if a task did: XLA's threads would not survive it.
template <class Fn>
void ParallelFor(ffi::ThreadPool& pool, int64_t tasks, const Fn& fn) {
  struct Job {
    const Fn* fn;
    int64_t tasks;
    std::atomic<int64_t> next{0}, done{0};
    std::atomic<bool> out_of_memory{false};
    void Run() {
      int64_t mine = 0;
      for (int64_t t; (t = next.fetch_add(1, std::memory_order_relaxed)) < tasks; ++mine) {
        try {
          (*fn)(t);
        } catch (const std::bad_alloc&) {
          out_of_memory.store(true, std::memory_order_relaxed);
        }
      }
      done.fetch_add(mine, std::memory_order_release);
    }
  };
  const int64_t helpers = std::min(pool.num_threads(), tasks) - 1;
  if (helpers <= 0) {
    for (int64_t t = 0; t < tasks; ++t) fn(t);
    return;
  }
  auto job = std::make_shared<Job>();
  job->fn = &fn;
  job->tasks = tasks;
  try {
    for (int64_t i = 0; i < helpers; ++i) pool.Schedule([job] { job->Run(); });
  } catch (const std::bad_alloc&) {  // fewer helpers: those that have begun still need `fn`
  }
  job->Run();
  for (int64_t spins = 0; job->done.load(std::memory_order_acquire) < tasks; ++spins) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
    if (spins > 2000) sched_yield();  // somebody else has the helper's core
  }
  if (job->out_of_memory.load(std::memory_order_relaxed)) throw std::bad_alloc();
}

// --- operands

ffi::Error Invalid(const std::string& what) {
  return ffi::Error::InvalidArgument("jaxlab: " + what);
}

ffi::Error OutOfMemory() {
  return ffi::Error(ffi::ErrorCode::kResourceExhausted, "jaxlab: no memory for the rows of x");
}

bool IsDtype(ffi::DataType type) { return type == ffi::F32 || type == ffi::BF16; }

int64_t Elements(const ffi::AnyBuffer& x) { return static_cast<int64_t>(x.element_count()); }

Array Matrix(const ffi::AnyBuffer& x) {
  const auto dims = x.dimensions();
  const Dtype dtype = x.element_type() == ffi::F32 ? Dtype::kFloat32 : Dtype::kBfloat16;
  return {x.untyped_data(), dtype, dims[0], dims[1]};
}

// The matrix `layer` of codes [*stack, O, K / 2], scale [*stack, O, k], multiplier [*stack].
ffi::Error MakePacked(const ffi::AnyBuffer& codes, const ffi::AnyBuffer& scale,
                      const ffi::AnyBuffer& multiplier, int64_t layer, Packed* out) {
  const auto dims = codes.dimensions(), scales = scale.dimensions();
  const size_t rank = dims.size();
  if (rank < 2 || rank > 3 || scales.size() != rank || codes.element_type() != ffi::U8)
    return Invalid("codes must be uint8 [*stack, O, K / 2] with scales of the same rank");
  if (scale.element_type() != ffi::U8 && scale.element_type() != ffi::F8E4M3FN)
    return Invalid("scales must be uint8 (mxfp4) or float8_e4m3fn (nvfp4)");
  out->format = scale.element_type() == ffi::U8 ? Format::kMxfp4 : Format::kNvfp4;
  const int64_t block = out->format == Format::kMxfp4 ? 32 : 16;
  out->out = dims[rank - 2];
  out->in = 2 * dims[rank - 1];
  const int64_t stack = rank == 3 ? dims[0] : 1;
  if (out->in % block || scales[0] != dims[0] || scales[rank - 2] != out->out ||
      scales[rank - 1] != out->in / block || Elements(multiplier) != stack ||
      multiplier.element_type() != ffi::F32)
    return Invalid("scales must be [*stack, O, K / block], float32 multipliers [*stack]");
  if (stack == 0) return Invalid("a stack without entries has no layer");
  layer = std::max<int64_t>(0, std::min(layer, stack - 1));
  const int64_t entries = layer * out->out;
  out->codes = static_cast<const uint8_t*>(codes.untyped_data()) + entries * (out->in / 2);
  out->scale = static_cast<const uint8_t*>(scale.untyped_data()) + entries * (out->in / block);
  out->multiplier = static_cast<const float*>(multiplier.untyped_data())[layer];
  return ffi::Error::Success();
}

// Memory for the rows of x of one call, in the calling thread's own buffer unless it is large.
struct RowMemory {
  explicit RowMemory(size_t bytes) : data((bytes <= kKept ? rows_kept : large).Get(bytes)) {}
  Buffer large;
  void* data;
};

constexpr int64_t kRowsOfTask = 32;      // of W, for many rows of x; of x, where they are prepared
constexpr int64_t kRowsOfBackward = 96;  // of dy
constexpr int64_t kFewRows = 8;          // of x: the weights' way from memory counts
constexpr int64_t kBytesOfTask = 24 << 10;

int64_t Tasks(int64_t count, int64_t each) { return (count + each - 1) / each; }

// Rows of W in a task: for few rows of x a piece of memory of some size, and the same number of
// tasks for every thread.
int64_t RowsOfTask(ffi::ThreadPool& pool, int64_t x_rows, int64_t w_rows, int64_t bytes_of_row) {
  if (x_rows > kFewRows) return kRowsOfTask;
  const int64_t threads = std::max<int64_t>(1, pool.num_threads());
  const int64_t tasks = threads * Tasks(w_rows * bytes_of_row, threads * kBytesOfTask);
  if (tasks == 0) return kRowsOfTask;  // an empty matrix
  return Tasks(Tasks(w_rows, tasks), 4) * 4;
}

Range Part(int64_t task, int64_t each, int64_t count) {
  return {task * each, std::min(count, (task + 1) * each)};
}

// Prepares rows of x: on this thread unless there are many.
template <class Fn>
void EachRows(ffi::ThreadPool& pool, int64_t rows, const Fn& fn) {
  ParallelFor(pool, Tasks(rows, kRowsOfTask), [&](int64_t t) { fn(Part(t, kRowsOfTask, rows)); });
}

// --- handlers

// No exception may reach XLA, which is called through C.

// x [M, K], layer i32 [], then codes, scale and multiplier of every matrix; y [M, O] for each.
ffi::Error Forward(ffi::ThreadPool pool, std::string_view isa, bool int8, ffi::AnyBuffer x,
                   ffi::Buffer<ffi::S32> layer, ffi::RemainingArgs packed,
                   ffi::RemainingRets ys) try {
  const Kernels* kernels = Find(isa);
  if (kernels == nullptr) return Invalid("this CPU has no '" + std::string(isa) + "'");
  if (x.dimensions().size() != 2 || !IsDtype(x.element_type()))
    return Invalid("x must be float32 or bfloat16 [M, K]");
  const Array rows = Matrix(x);
  struct Product {
    Packed w;
    Array y;
    int64_t first_task;
  };
  std::vector<Product> products(ys.size());
  int64_t w_rows = 0;
  for (size_t i = 0; i < ys.size(); ++i) {
    auto codes = packed.get<ffi::AnyBuffer>(3 * i), scale = packed.get<ffi::AnyBuffer>(3 * i + 1);
    auto multiplier = packed.get<ffi::AnyBuffer>(3 * i + 2);
    auto y = ys.get<ffi::AnyBuffer>(i);
    if (!codes || !scale || !multiplier || !y) return Invalid("an operand is missing");
    Product& p = products[i];
    if (auto e = MakePacked(*codes, *scale, *multiplier, *layer.typed_data(), &p.w); e.failure())
      return e;
    p.y = Matrix(**y);
    if (p.w.in != rows.columns || p.y.rows != rows.rows || p.y.columns != p.w.out)
      return Invalid("shapes of x, codes and y do not fit");
    w_rows += p.w.out;
  }
  const int64_t each = RowsOfTask(pool, rows.rows, w_rows, rows.columns / 2);
  int64_t tasks = 0;
  for (Product& p : products) {
    p.first_task = tasks;
    tasks += Tasks(p.w.out, each);
  }
  const int64_t chunks = Chunks(rows.columns), stride = Stride(chunks * kChunk);
  RowMemory memory(rows.rows * (int8 ? chunks * sizeof(Int8Chunk) : stride * sizeof(float)));
  auto* x_int8 = static_cast<Int8Chunk*>(memory.data);
  const Rows x_rows = {static_cast<float*>(memory.data), rows.rows, chunks * kChunk, stride};
  EachRows(pool, rows.rows, [&](Range r) {
    int8 ? kernels->round(rows, x_int8, r) : kernels->arrange(rows, x_rows, r);
  });
  ParallelFor(pool, tasks, [&](int64_t task) {
    size_t i = products.size() - 1;
    while (products[i].first_task > task) --i;
    const Product& p = products[i];
    const Range out = Part(task - p.first_task, each, p.w.out);
    int8 ? kernels->forward_int8(p.w, x_int8, p.y, out) : kernels->forward(p.w, x_rows, p.y, out);
  });
  return ffi::Error::Success();
} catch (const std::bad_alloc&) {
  return OutOfMemory();
}

// dy [M, O] -> dx [M, K].
ffi::Error Backward(ffi::ThreadPool pool, std::string_view isa, ffi::AnyBuffer dy,
                    ffi::Buffer<ffi::S32> layer, ffi::AnyBuffer codes, ffi::AnyBuffer scale,
                    ffi::AnyBuffer multiplier, ffi::Result<ffi::AnyBuffer> dx) try {
  const Kernels* kernels = Find(isa);
  if (kernels == nullptr) return Invalid("this CPU has no '" + std::string(isa) + "'");
  if (dy.dimensions().size() != 2 || !IsDtype(dy.element_type()))
    return Invalid("dy must be float32 or bfloat16 [M, O]");
  Packed w;
  if (auto e = MakePacked(codes, scale, multiplier, *layer.typed_data(), &w); e.failure()) return e;
  const Array rows = Matrix(dy), out = Matrix(*dx);
  if (rows.columns != w.out || out.rows != rows.rows || out.columns != w.in)
    return Invalid("shapes of dy, codes and dx do not fit");
  const int64_t stride = Stride(w.out);
  RowMemory memory(rows.rows * stride * sizeof(float));
  const Rows dy_rows = {static_cast<float*>(memory.data), rows.rows, w.out, stride};
  EachRows(pool, rows.rows, [&](Range r) { kernels->widen(rows, dy_rows, r); });
  const int64_t chunks = Chunks(w.in);
  ParallelFor(pool, chunks * Tasks(rows.rows, kRowsOfBackward), [&](int64_t task) {
    const Range r = Part(task / chunks, kRowsOfBackward, rows.rows);
    kernels->backward(w, dy_rows, out, task % chunks, r);
  });
  return ffi::Error::Success();
} catch (const std::bad_alloc&) {
  return OutOfMemory();
}

// -> W [O, K] without the multiplier, in the result's dtype, which holds it exactly.
ffi::Error Decode(ffi::ThreadPool pool, std::string_view isa, ffi::Buffer<ffi::S32> layer,
                  ffi::AnyBuffer codes, ffi::AnyBuffer scale, ffi::AnyBuffer multiplier,
                  ffi::Result<ffi::AnyBuffer> dense) try {
  const Kernels* kernels = Find(isa);
  if (kernels == nullptr) return Invalid("this CPU has no '" + std::string(isa) + "'");
  Packed w;
  if (auto e = MakePacked(codes, scale, multiplier, *layer.typed_data(), &w); e.failure()) return e;
  if (dense->dimensions().size() != 2 || !IsDtype(dense->element_type()))
    return Invalid("the dense matrix must be float32 or bfloat16 [O, K]");
  const Array to = Matrix(*dense);
  if (to.rows != w.out || to.columns != w.in) return Invalid("shapes of codes and result differ");
  const int64_t each = RowsOfTask(pool, 1, w.out, w.in / 2);
  ParallelFor(pool, Tasks(w.out, each),
              [&](int64_t task) { kernels->decode(w, to, Part(task, each, w.out)); });
  return ffi::Error::Success();
} catch (const std::bad_alloc&) {
  return OutOfMemory();
}

// x [M, K], codes int8 [V, K], scale float32 [V, K / 32 or 1] -> float32 [M, V].
ffi::Error Int8Head(ffi::ThreadPool pool, std::string_view isa, ffi::AnyBuffer x,
                    ffi::BufferR2<ffi::S8> codes, ffi::BufferR2<ffi::F32> scale,
                    ffi::Result<ffi::BufferR2<ffi::F32>> y) try {
  const Kernels* kernels = Find(isa);
  if (kernels == nullptr) return Invalid("this CPU has no '" + std::string(isa) + "'");
  if (x.dimensions().size() != 2 || !IsDtype(x.element_type()))
    return Invalid("x must be float32 or bfloat16 [M, K]");
  const Array rows = Matrix(x);
  const int64_t out = codes.dimensions()[0], in = codes.dimensions()[1];
  const int64_t blocks = scale.dimensions()[1];
  if (in != rows.columns || in % 32 || blocks < 1 || scale.dimensions()[0] != out ||
      (blocks != 1 && blocks != in / 32) || y->dimensions()[1] != out ||
      y->dimensions()[0] != rows.rows)
    return Invalid("shapes of x, codes, scale and y do not fit");
  const Int8 w = {codes.typed_data(), scale.typed_data(), out, in, in / blocks};
  const Array result = {y->typed_data(), Dtype::kFloat32, rows.rows, out};
  const int64_t stride = Stride(in);
  RowMemory memory(rows.rows * stride * sizeof(float));
  const Rows x_rows = {static_cast<float*>(memory.data), rows.rows, in, stride};
  EachRows(pool, rows.rows, [&](Range r) { kernels->widen(rows, x_rows, r); });
  const int64_t each = RowsOfTask(pool, rows.rows, out, in);
  ParallelFor(pool, Tasks(out, each), [&](int64_t task) {
    kernels->head(w, x_rows, result, Part(task, each, out));
  });
  return ffi::Error::Success();
} catch (const std::bad_alloc&) {
  return OutOfMemory();
}

}  // namespace
}  // namespace jaxlab

using jaxlab::Backward;
using jaxlab::Decode;
using jaxlab::Forward;
using jaxlab::Int8Head;

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxlab_fp4_forward, Forward,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Attr<std::string_view>("isa")
                                  .Attr<bool>("int8")
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .RemainingArgs()
                                  .RemainingRets());

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxlab_fp4_backward, Backward,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Attr<std::string_view>("isa")
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxlab_fp4_decode, Decode,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Attr<std::string_view>("isa")
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxlab_int8_head, Int8Head,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Attr<std::string_view>("isa")
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::BufferR2<ffi::S8>>()
                                  .Arg<ffi::BufferR2<ffi::F32>>()
                                  .Ret<ffi::BufferR2<ffi::F32>>());

// The instruction sets of this CPU, best last, separated by blanks.
extern "C" const char* jaxlab_isas() {
  static const std::string names = [] {
    std::string all;
    for (const auto& isa : jaxlab::Isas()) {
      if (isa.here) all += (all.empty() ? "" : " ") + std::string(isa.name);
    }
    return all;
  }();
  return names.c_str();
}
