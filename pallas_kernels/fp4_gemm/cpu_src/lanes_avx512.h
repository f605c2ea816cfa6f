// Sixteen lanes in one register: AVX-512 F, BW, VL, DQ, and VNNI where the unit has it.
#pragma once

#include <immintrin.h>

#include <cstring>

#include "types.h"

namespace jaxlab {
namespace {

struct Lanes {
  // Rows of x up to which W is decoded in registers; rows of x, vectors of a chunk in one step.
  static constexpr int kDirect = 5, kDirectX = 3, kTileX = 6, kInt8X = 4, kOuterX = 3, kOuterN = 8;

  using F = __m512;
  using W = __m512i;

  static F Zero() { return _mm512_setzero_ps(); }
  static F Fill(float x) { return _mm512_set1_ps(x); }
  static F Load(const float* p) { return _mm512_loadu_ps(p); }
  static void Store(float* p, F x) { _mm512_storeu_ps(p, x); }
  static F Add(F a, F b) { return _mm512_add_ps(a, b); }
  static F Mul(F a, F b) { return _mm512_mul_ps(a, b); }
  static F MulAdd(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }

  static W LoadCodes(const uint8_t* p) { return _mm512_loadu_si512(p); }
  static W LoadCodes(const uint8_t* p, int64_t bytes) {  // the rest are zeros
    return _mm512_maskz_loadu_epi8((uint64_t{1} << bytes) - 1, p);
  }
  // Values of one nibble of every word; the permutation reads the lowest four bits.
  template <int kNibble>
  static F Value(W codes) {
    const F values = _mm512_setr_ps(0.f, .5f, 1.f, 1.5f, 2.f, 3.f, 4.f, 6.f, -0.f, -.5f, -1.f,
                                    -1.5f, -2.f, -3.f, -4.f, -6.f);
    return _mm512_permutexvar_ps(_mm512_srli_epi32(codes, 4 * kNibble), values);
  }
  // Values of sixteen neighbouring columns.
  static F ValueInOrder(const uint8_t* p) {
    int64_t bytes;
    __builtin_memcpy(&bytes, p, 8);
    const W halves = _mm512_inserti64x4(_mm512_set1_epi32(int(bytes)),
                                        _mm256_set1_epi32(int(bytes >> 32)), 1);
    const W shift =
        _mm512_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28, 0, 4, 8, 12, 16, 20, 24, 28);
    return Value<0>(_mm512_srlv_epi32(halves, shift));
  }
  static F LoadInt8(const int8_t* p) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)));
  }

  // Eight e4m3 scales times 2^-8, each in two lanes: as float16 their exponent is 8 too small.
  static F ScaleNv(uint64_t bytes) {
    const __m256i spread =
        _mm256_setr_epi8(-1, 0, -1, 0, -1, 1, -1, 1, -1, 2, -1, 2, -1, 3, -1, 3, -1, 4, -1, 4, -1,
                         5, -1, 5, -1, 6, -1, 6, -1, 7, -1, 7);
    const __m256i high = _mm256_shuffle_epi8(_mm256_set1_epi64x(bytes), spread);
    const __m256i half = _mm256_and_si256(_mm256_srai_epi16(high, 1), _mm256_set1_epi16(0xBFFF));
    return _mm512_cvtph_ps(half);
  }
  // Four e8m0 scales, each in four lanes. Byte 0, a denormal, is zero: XLA's threads flush them.
  static F ScaleMx(uint32_t bytes) {
    const __m512i spread = _mm512_set_epi8(
        3, -1, -1, -1, 3, -1, -1, -1, 3, -1, -1, -1, 3, -1, -1, -1, 2, -1, -1, -1, 2, -1, -1, -1,
        2, -1, -1, -1, 2, -1, -1, -1, 1, -1, -1, -1, 1, -1, -1, -1, 1, -1, -1, -1, 1, -1, -1, -1,
        0, -1, -1, -1, 0, -1, -1, -1, 0, -1, -1, -1, 0, -1, -1, -1);
    return _mm512_castsi512_ps(
        _mm512_srli_epi32(_mm512_shuffle_epi8(_mm512_set1_epi32(bytes), spread), 1));
  }

  // The sum of each lane's eight products of int8, in units of a half code.
  static F DotInt8(W codes, const Int8Chunk& x) {
    const __m512i doubled = _mm512_broadcast_i32x4(  // plus 12: the first operand is unsigned
        _mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0));
    const __m512i low = _mm512_set1_epi8(15);
    const W even = _mm512_shuffle_epi8(doubled, _mm512_and_si512(codes, low));
    const W odd =
        _mm512_shuffle_epi8(doubled, _mm512_and_si512(_mm512_srli_epi32(codes, 4), low));
    const W x_even = _mm512_loadu_si512(x.even), x_odd = _mm512_loadu_si512(x.odd);
    const W offset = _mm512_loadu_si512(x.offset);
#if defined(__AVX512VNNI__)
    const W sum = _mm512_dpbusd_epi32(_mm512_dpbusd_epi32(offset, even, x_even), odd, x_odd);
#else
    const W pairs = _mm512_add_epi16(_mm512_maddubs_epi16(even, x_even),  // at most 4 * 24 * 127
                                     _mm512_maddubs_epi16(odd, x_odd));
    const W sum = _mm512_add_epi32(offset, _mm512_madd_epi16(pairs, _mm512_set1_epi16(1)));
#endif
    return _mm512_cvtepi32_ps(sum);
  }

  // Sums over the lanes of four vectors.
  static void Sum4(F a, F b, F c, F d, float* to) {
    const F ab = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
    const F cd = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
    const F all = _mm512_add_ps(_mm512_shuffle_ps(ab, cd, 0x44), _mm512_shuffle_ps(ab, cd, 0xEE));
    const __m256 half =
        _mm256_add_ps(_mm512_castps512_ps256(all), _mm512_extractf32x8_ps(all, 1));
    _mm_storeu_ps(to, _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1)));
  }
};

}  // namespace
}  // namespace jaxlab
