// Sixteen lanes in two registers: AVX2, FMA, F16C.
#pragma once

#include <immintrin.h>

#include <cstring>

#include "types.h"

namespace jaxlab {
namespace {

struct Lanes {
  // Rows of x up to which W is decoded in registers; rows of x, vectors of a chunk in one step.
  static constexpr int kDirect = 2, kDirectX = 1, kTileX = 1, kInt8X = 1, kOuterX = 1, kOuterN = 4;

  struct F {
    __m256 a, b;
  };
  struct W {
    __m256i a, b;
  };

  static F Zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
  static F Fill(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
  static F Load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
  static void Store(float* p, F x) {
    _mm256_storeu_ps(p, x.a);
    _mm256_storeu_ps(p + 8, x.b);
  }
  static F Add(F x, F y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
  static F Mul(F x, F y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
  static F MulAdd(F x, F y, F z) {
    return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)};
  }

  static W LoadCodes(const uint8_t* p) {
    return {_mm256_loadu_si256((const __m256i*)p), _mm256_loadu_si256((const __m256i*)(p + 32))};
  }
  static W LoadCodes(const uint8_t* p, int64_t bytes) {  // the rest are zeros
    alignas(32) uint8_t whole[64] = {};
    __builtin_memcpy(whole, p, bytes);
    return LoadCodes(whole);
  }
  template <int kNibble>
  static F Value(W codes) {
    return {Value8<kNibble>(codes.a), Value8<kNibble>(codes.b)};
  }
  // Values of sixteen neighbouring columns.
  static F ValueInOrder(const uint8_t* p) {
    int64_t bytes;
    __builtin_memcpy(&bytes, p, 8);
    const __m256i shift = _mm256_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28);
    return {Value8<0>(_mm256_srlv_epi32(_mm256_set1_epi32(int(bytes)), shift)),
            Value8<0>(_mm256_srlv_epi32(_mm256_set1_epi32(int(bytes >> 32)), shift))};
  }
  static F LoadInt8(const int8_t* p) {
    const __m128i bytes = _mm_loadu_si128((const __m128i*)p);
    return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes)),
            _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(bytes, 8)))};
  }

  // Eight e4m3 scales times 2^-8, each in two lanes: as float16 their exponent is 8 too small.
  static F ScaleNv(uint64_t bytes) {
    const __m256i spread =
        _mm256_setr_epi8(-1, 0, -1, 0, -1, 1, -1, 1, -1, 2, -1, 2, -1, 3, -1, 3, -1, 4, -1, 4, -1,
                         5, -1, 5, -1, 6, -1, 6, -1, 7, -1, 7);
    const __m256i high = _mm256_shuffle_epi8(_mm256_set1_epi64x(bytes), spread);
    const __m256i half = _mm256_and_si256(_mm256_srai_epi16(high, 1), _mm256_set1_epi16(0xBFFF));
    return {_mm256_cvtph_ps(_mm256_castsi256_si128(half)),
            _mm256_cvtph_ps(_mm256_extracti128_si256(half, 1))};
  }
  // Four e8m0 scales, each in four lanes. Byte 0, a denormal, is zero: XLA's threads flush them.
  static F ScaleMx(uint32_t bytes) {
    const __m256i spread = _mm256_setr_epi8(-1, -1, -1, 0, -1, -1, -1, 0, -1, -1, -1, 0, -1, -1, -1,
                                            0, -1, -1, -1, 1, -1, -1, -1, 1, -1, -1, -1, 1, -1, -1,
                                            -1, 1);
    return {Exponent(bytes, spread), Exponent(bytes >> 16, spread)};
  }

  // The sum of each lane's eight products of int8, in units of a half code.
  static F DotInt8(W codes, const Int8Chunk& x) {
    return {Dot8(codes.a, x.even, x.odd, x.offset),
            Dot8(codes.b, x.even + 32, x.odd + 32, x.offset + 8)};
  }

  // Sums over the lanes of four vectors.
  static void Sum4(F a, F b, F c, F d, float* to) {
    const __m256 ab = _mm256_hadd_ps(_mm256_add_ps(a.a, a.b), _mm256_add_ps(b.a, b.b));
    const __m256 cd = _mm256_hadd_ps(_mm256_add_ps(c.a, c.b), _mm256_add_ps(d.a, d.b));
    const __m256 all = _mm256_hadd_ps(ab, cd);
    _mm_storeu_ps(to, _mm_add_ps(_mm256_castps256_ps128(all), _mm256_extractf128_ps(all, 1)));
  }

 private:
  // The permutation reads three bits; the fourth is the sign.
  template <int kNibble>
  static __m256 Value8(__m256i codes) {
    const __m256 values = _mm256_setr_ps(0.f, .5f, 1.f, 1.5f, 2.f, 3.f, 4.f, 6.f);
    const __m256i sign = _mm256_and_si256(_mm256_slli_epi32(codes, 28 - 4 * kNibble),
                                          _mm256_set1_epi32(int(0x80000000u)));
    return _mm256_xor_ps(_mm256_permutevar8x32_ps(values, _mm256_srli_epi32(codes, 4 * kNibble)),
                         _mm256_castsi256_ps(sign));
  }
  static __m256 Exponent(uint32_t bytes, __m256i spread) {
    return _mm256_castsi256_ps(
        _mm256_srli_epi32(_mm256_shuffle_epi8(_mm256_set1_epi32(bytes), spread), 1));
  }
  static __m256 Dot8(__m256i codes, const int8_t* x_even, const int8_t* x_odd,
                     const int32_t* offset) {
    const __m256i doubled = _mm256_broadcastsi128_si256(  // plus 12: the first operand is unsigned
        _mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0));
    const __m256i low = _mm256_set1_epi8(15);
    const __m256i even = _mm256_shuffle_epi8(doubled, _mm256_and_si256(codes, low));
    const __m256i odd =
        _mm256_shuffle_epi8(doubled, _mm256_and_si256(_mm256_srli_epi32(codes, 4), low));
    const __m256i pairs = _mm256_add_epi16(  // at most 4 * 24 * 127
        _mm256_maddubs_epi16(even, _mm256_loadu_si256((const __m256i*)x_even)),
        _mm256_maddubs_epi16(odd, _mm256_loadu_si256((const __m256i*)x_odd)));
    const __m256i sum = _mm256_add_epi32(_mm256_loadu_si256((const __m256i*)offset),
                                         _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
    return _mm256_cvtepi32_ps(sum);
  }
};

}  // namespace
}  // namespace jaxlab
