// Numbers in memory, and rows of x in the orders that the loops read.
#pragma once

#include "types.h"

#define JAXLAB_INLINE __attribute__((always_inline))

namespace jaxlab {
namespace {

template <class T>
constexpr T Min(T a, T b) {
  return a < b ? a : b;
}

float FromBits(uint32_t bits) {
  float x;
  __builtin_memcpy(&x, &bits, 4);
  return x;
}

uint32_t Bits(float x) {
  uint32_t bits;
  __builtin_memcpy(&bits, &x, 4);
  return bits;
}

const float kNan = FromBits(0x7FC00000);

uint16_t ToBfloat16(float x) {  // to nearest, ties to even
  const uint32_t bits = Bits(x);
  if ((bits & 0x7FFFFFFF) > 0x7F800000) return (bits >> 16) | 64;  // NaN
  return (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
}

inline void Put(const Array& to, int64_t row, int64_t column, float x) {
  const int64_t at = row * to.columns + column;
  if (to.dtype == Dtype::kFloat32) {
    static_cast<float*>(to.data)[at] = x;
  } else {
    static_cast<uint16_t*>(to.data)[at] = ToBfloat16(x);
  }
}

// `count` numbers of one row as float32.
inline void Read(const Array& x, int64_t row, int64_t column, int64_t count, float* to) {
  const int64_t at = row * x.columns + column;
  if (x.dtype == Dtype::kFloat32) {
    __builtin_memcpy(to, static_cast<const float*>(x.data) + at, 4 * count);
  } else {
    const uint16_t* from = static_cast<const uint16_t*>(x.data) + at;
    for (int64_t i = 0; i < count; ++i) to[i] = FromBits(uint32_t{from[i]} << 16);
  }
}

// fn(row, chunk, its 128 numbers), the last chunk filled up with zeros.
template <class Fn>
inline void EachChunk(const Array& x, Range rows, Fn fn) {
  for (int64_t m = rows.begin; m < rows.end; ++m) {
    for (int64_t c = 0; c < Chunks(x.columns); ++c) {
      float chunk[kChunk] = {};
      Read(x, m, c * kChunk, Min(kChunk, x.columns - c * kChunk), chunk);
      fn(m, c, chunk);
    }
  }
}

void Arrange(const Array& x, const Rows& to, Range rows) {
  EachChunk(x, rows, [&](int64_t m, int64_t c, const float* chunk) {
    float* arranged = to.data + m * to.stride + c * kChunk;
    for (int n = 0; n < kNibbles; ++n) {
      for (int i = 0; i < kLanes; ++i) arranged[n * kLanes + i] = chunk[i * kNibbles + n];
    }
  });
}

void Widen(const Array& x, const Rows& to, Range rows) {
  for (int64_t m = rows.begin; m < rows.end; ++m) {
    float* row = to.data + m * to.stride;
    Read(x, m, 0, x.columns, row);
    for (int64_t k = x.columns; k < to.columns; ++k) row[k] = 0;
  }
}

// A block of 32 numbers is scale * integers of at most 127. A block with NaN or an infinity gets
// the scale NaN, so that the result is not a number either.
inline float RoundBlock(const float* block, int32_t* rounded) {
  float amax = 0, check = 0;
  for (int i = 0; i < 32; ++i) {
    const float a = __builtin_fabsf(block[i]);
    amax = a > amax ? a : amax;
    check += block[i] * 0.f;
  }
  const float inverse = amax > 1e-36f ? 127.f / amax : 0.f;  // 127 / amax must be finite
  constexpr float kMagic = 12582912.f;  // 1.5 * 2^23: adding it rounds to an integer, ties to even
  for (int i = 0; i < 32; ++i) {
    rounded[i] = int32_t(Bits(block[i] * inverse + kMagic)) - 0x4B400000;
  }
  return check == 0.f ? amax * (1.f / 127) : kNan;
}

void Round(const Array& x, Int8Chunk* to, Range rows) {
  EachChunk(x, rows, [&](int64_t m, int64_t c, const float* chunk) {
    Int8Chunk& out = to[m * Chunks(x.columns) + c];
    int32_t rounded[kChunk];
    for (int b = 0; b < 4; ++b) {
      const float scale = RoundBlock(chunk + 32 * b, rounded + 32 * b);
      for (int i = 0; i < 4; ++i) out.scale[4 * b + i] = .5f * scale;
    }
    for (int j = 0; j < kChunk / 2; ++j) {
      out.even[j] = int8_t(rounded[2 * j]);
      out.odd[j] = int8_t(rounded[2 * j + 1]);
    }
    for (int i = 0; i < kLanes; ++i) {
      int32_t sum = 0;
      for (int n = 0; n < kNibbles; ++n) sum += rounded[kNibbles * i + n];
      out.offset[i] = -12 * sum;
    }
  });
}

}  // namespace
}  // namespace jaxlab
