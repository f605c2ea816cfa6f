// What the units of this library share: operands, the order of an input row, the table of kernels.
//
// Each unit (avx2.cc, ...) is compiled for another CPU, so nothing here may have code that two
// units could emit under one name. Dims: M rows, O out, K in. Codes and scales: fp4_gemm/codec.py.
#pragma once

#include <cstdint>

namespace jaxlab {

// A chunk is 128 columns: 64 bytes, sixteen 32-bit words of eight codes. Word i holds columns
// 8 i .. 8 i + 7, column 8 i + n in its nibble n. A vector is one nibble of all sixteen words, so
// that decoding needs no shuffle; rows of x are put into that order once: x[n][i] = column 8 i + n.
// A block of 16 (32) columns is two (four) neighbouring lanes of each of the eight vectors.
constexpr int64_t kChunk = 128;
constexpr int64_t kLanes = 16;
constexpr int64_t kNibbles = 8;

static constexpr int64_t Chunks(int64_t columns) { return (columns + kChunk - 1) / kChunk; }

enum class Format { kNvfp4, kMxfp4 };
enum class Dtype { kFloat32, kBfloat16 };

struct Packed {
  const uint8_t* codes;  // [O, K / 2]
  const uint8_t* scale;  // [O, K / block], bytes of e4m3 or e8m0
  float multiplier;      // the tensor scale
  int64_t out, in;
  Format format;
};

struct Int8 {  // element = code * scale of its block
  const int8_t* codes;     // [O, K], K a multiple of 32
  const float* scale;      // [O, K / block]
  int64_t out, in, block;  // block: 32 or K
};

struct Array {  // a matrix [rows, columns] in row-major order
  void* data;
  Dtype dtype;
  int64_t rows, columns;
};

struct Rows {  // float32 rows [count, columns], filled up with zeros
  float* data;
  int64_t count, columns, stride;
};

// A stride that is no multiple of 4 KiB: else all rows would share a few places of the cache.
static constexpr int64_t Stride(int64_t columns) {
  return columns % 1024 ? columns : columns + kLanes;
}

struct Int8Chunk {  // 128 columns of x rounded to int8, by blocks of 32
  int8_t even[64], odd[64];  // columns 2 j and 2 j + 1
  int32_t offset[kLanes];    // -12 times the sum of a lane's eight columns
  float scale[kLanes];       // of a lane's block, halved: codes are doubled
};

struct Range {
  int64_t begin, end;
};

// One instruction set.
struct Kernels {
  // x into the order of chunks, for a range of its rows.
  void (*arrange)(const Array& x, const Rows& to, Range rows);
  // x as it is, in float32.
  void (*widen)(const Array& x, const Rows& to, Range rows);
  // x rounded to int8, Chunks(K) a row.
  void (*round)(const Array& x, Int8Chunk* to, Range rows);
  // y[:, o] = multiplier * x @ W[o].T for a range of o; x arranged.
  void (*forward)(const Packed& w, const Rows& x, const Array& y, Range out);
  void (*forward_int8)(const Packed& w, const Int8Chunk* x, const Array& y, Range out);
  // dx[m, chunk] = multiplier * dy[m] @ W[:, chunk] for a range of m; dy widened.
  void (*backward)(const Packed& w, const Rows& dy, const Array& dx, int64_t chunk, Range rows);
  // Rows of W without the multiplier, exact in both dtypes, into `to` [O, K].
  void (*decode)(const Packed& w, const Array& to, Range out);
  // y[:, o] = x @ W[o].T for a range of o; x widened.
  void (*head)(const Int8& w, const Rows& x, const Array& y, Range out);
};

// Room for `floats` numbers of the calling thread, until it asks again.
float* Scratch(int64_t floats);

extern const Kernels kPortable;
#if defined(__x86_64__)
extern const Kernels kAvx2;
extern const Kernels kAvx512;
extern const Kernels kAvx512Vnni;
#endif

}  // namespace jaxlab
