// Sixteen lanes in a vector of the compiler's own (GCC, Clang): any little-endian CPU.
#pragma once

#include "rows.h"

namespace jaxlab {
namespace {

struct E4m3Table {  // values times 2^-8; bytes 127 and 255 as if they were numbers
  float of[256] = {};
  constexpr E4m3Table() {
    for (int byte = 0; byte < 256; ++byte) {
      const int exponent = byte >> 3 & 15, mantissa = byte & 7;
      float value = exponent ? 8 + mantissa : mantissa;  // times 2^(max(exponent, 1) - 10 - 8)
      for (int i = 18; i > (exponent ? exponent : 1); --i) value *= .5f;
      of[byte] = byte < 128 ? value : -value;
    }
  }
};

constexpr E4m3Table kE4m3;

struct Lanes {
  // Rows of x up to which W is decoded in registers; rows of x, vectors of a chunk in one step.
  static constexpr int kDirect = 2, kDirectX = 1, kTileX = 1, kInt8X = 1, kOuterX = 1, kOuterN = 2;

  typedef float F __attribute__((vector_size(64)));
  typedef uint32_t W __attribute__((vector_size(64)));
  typedef int32_t I __attribute__((vector_size(64)));

  static F Zero() { return F{}; }
  static F Fill(float x) { return F{} + x; }
  static F Load(const float* p) {
    F out;
    __builtin_memcpy(&out, p, sizeof(out));
    return out;
  }
  static void Store(float* p, F x) { __builtin_memcpy(p, &x, sizeof(x)); }
  static F Mul(F a, F b) { return a * b; }
  static F MulAdd(F a, F b, F c) { return a * b + c; }

  static W LoadCodes(const uint8_t* p) { return LoadCodes(p, 64); }
  static W LoadCodes(const uint8_t* p, int64_t bytes) {  // the rest are zeros
    W out = {};
    __builtin_memcpy(&out, p, bytes);
    return out;
  }
  template <int kNibble>
  static F Value(W codes) {
    return Decode(codes >> (4 * kNibble));
  }
  // Values of sixteen neighbouring columns.
  static F ValueInOrder(const uint8_t* p) {
    W codes;
    for (int i = 0; i < kLanes; ++i) codes[i] = p[i / 2] >> (4 * (i % 2));
    return Decode(codes);
  }
  __attribute__((noinline)) static F LoadInt8(const int8_t* p) {
    F out;
    for (int i = 0; i < kLanes; ++i) out[i] = float(p[i]);
    return out;
  }

  // Eight e4m3 scales times 2^-8, each in two lanes.
  static F ScaleNv(uint64_t bytes) {
    F out;
    for (int i = 0; i < kLanes; ++i) out[i] = kE4m3.of[(bytes >> (8 * (i / 2))) & 255];
    return out;
  }
  // Four e8m0 scales, each in four lanes. Byte 0, a denormal, is zero: XLA's threads flush them.
  __attribute__((noinline)) static F ScaleMx(uint32_t bytes) {
    W bits;
    for (int i = 0; i < kLanes; ++i) bits[i] = ((bytes >> (8 * (i / 4))) & 255) << 23;
    return (F)bits;
  }

  // The sum of each lane's eight products of int8, in units of a half code.
  __attribute__((noinline)) static F DotInt8(W codes, const Int8Chunk& x) {
    static constexpr int8_t kDoubled[16] = {0, 1,  2,  3,  4,  6,  8,  12,
                                            0, -1, -2, -3, -4, -6, -8, -12};
    F out;
    for (int i = 0; i < kLanes; ++i) {
      int32_t sum = 0;
      for (int n = 0; n < kNibbles; ++n) {
        const int8_t* columns = n % 2 ? x.odd : x.even;
        sum += kDoubled[(codes[i] >> (4 * n)) & 15] * columns[4 * i + n / 2];
      }
      out[i] = float(sum);
    }
    return out;
  }

  // Sums over the lanes of four vectors.
  __attribute__((noinline)) static void Sum4(F a, F b, F c, F d, float* to) {
    const F rows[4] = {a, b, c, d};
    for (int r = 0; r < 4; ++r) {
      float sum = 0;
      for (int i = 0; i < kLanes; ++i) sum += rows[r][i];
      to[r] = sum;
    }
  }

 private:
  // Values of the lowest nibbles. With exponent e and mantissa m, 2^(e - 1) (1 + m / 2) is a float
  // of the same bits; for e = 0 it is m / 2. No comparison: compilers make those lane by lane.
  JAXLAB_INLINE static F Decode(W codes) {
    const W number = ((codes & 7) << 22) + (126u << 23);
    const W half = (0 - (codes & 1)) & Bits(.5f);
    const W tiny = (W)((I)((codes & 6) - 1) >> 31);  // all ones for e = 0
    return (F)((number & ~tiny) | (half & tiny) | (codes & 8) << 28);
  }
};

}  // namespace
}  // namespace jaxlab
