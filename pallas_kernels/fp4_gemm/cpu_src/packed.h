// Decoding: codes and block scales of a matrix, chunk by chunk, with the unit's `Lanes`.
#pragma once

#include "rows.h"

namespace jaxlab {
namespace {

// Decoding takes a NaN scale for a number: whoever reads scales collects `nan` and looks again.
template <Format format>
struct Scales;

template <>
struct Scales<Format::kNvfp4> {
  static constexpr int64_t kBlock = 16;
  static constexpr float kUnit = 256;  // see Lanes::ScaleNv
  static Lanes::F Decode(uint64_t bytes) { return Lanes::ScaleNv(bytes); }
  // Not zero if a byte is 127 or 255.
  static uint64_t Nan(uint64_t bytes) {
    return ((bytes & 0x7F7F7F7F7F7F7F7F) + 0x0101010101010101) & 0x8080808080808080;
  }
};

template <>
struct Scales<Format::kMxfp4> {
  static constexpr int64_t kBlock = 32;
  static constexpr float kUnit = 1;
  static Lanes::F Decode(uint64_t bytes) { return Lanes::ScaleMx(uint32_t(bytes)); }
  // Not zero if a byte is 255.
  static uint64_t Nan(uint64_t bytes) {
    return (~bytes - 0x0101010101010101) & bytes & 0x8080808080808080;
  }
};

// Chunk `c` of row `o` of W; `columns` of it, if they are fewer than a whole one.
template <Format format>
struct Chunk {
  using S = Scales<format>;
  Lanes::W codes;
  Lanes::F scale;
  uint64_t bytes = 0;  // the block scales

  JAXLAB_INLINE Chunk(const Packed& w, int64_t o, int64_t c, int64_t columns) {
    constexpr int64_t kCount = kChunk / S::kBlock;
    const uint8_t* p = w.codes + o * (w.in / 2) + c * (kChunk / 2);
    const uint8_t* s = w.scale + o * (w.in / S::kBlock) + c * kCount;
    if (columns == kChunk) {
      codes = Lanes::LoadCodes(p);
      __builtin_memcpy(&bytes, s, kCount);
    } else {
      codes = Lanes::LoadCodes(p, columns / 2);
      for (int64_t i = 0; i < columns / S::kBlock; ++i) bytes |= uint64_t{s[i]} << (8 * i);
    }
    scale = S::Decode(bytes);
  }
};

// Rows follow each other in memory, but four are read at a time, which the CPU does not foresee:
// what comes `kAhead` bytes later is asked for in time (a quarter less time out of memory).
constexpr int64_t kAhead = 4096;

template <Format format>
JAXLAB_INLINE inline void Prefetch(const Packed& w, int64_t o, int64_t c) {
  __builtin_prefetch(w.codes + o * (w.in / 2) + c * (kChunk / 2) + kAhead);
  const int64_t blocks = w.in / Scales<format>::kBlock;
  if (c % 8 == 0) __builtin_prefetch(w.scale + o * blocks + c * 8 + kAhead / 8);
}

template <Format format>
bool RowHasNan(const Packed& w, int64_t o) {
  using S = Scales<format>;
  const uint8_t* row = w.scale + o * (w.in / S::kBlock);
  uint64_t found = 0;
  for (int64_t i = 0; i < w.in / S::kBlock; ++i) found |= S::Nan(row[i]);
  return found;
}

// fn(n) for every nibble n, a constant.
template <int kN>
struct Nibble {
  static constexpr int value = kN;
};

template <class Fn>
JAXLAB_INLINE inline void EachNibble(Fn fn) {
  fn(Nibble<0>());
  fn(Nibble<1>());
  fn(Nibble<2>());
  fn(Nibble<3>());
  fn(Nibble<4>());
  fn(Nibble<5>());
  fn(Nibble<6>());
  fn(Nibble<7>());
}

// A chunk as 128 float32 values in the order of chunks, in units of Scales::kUnit.
template <Format format>
inline void DecodeChunk(const Packed& w, int64_t o, int64_t c, float* to) {
  const Chunk<format> chunk(w, o, c, Min(kChunk, w.in - c * kChunk));
  EachNibble([&](auto n) JAXLAB_INLINE {
    constexpr int kN = decltype(n)::value;
    Lanes::Store(to + kN * kLanes, Lanes::Mul(Lanes::Value<kN>(chunk.codes), chunk.scale));
  });
  if (!Scales<format>::Nan(chunk.bytes)) return;
  constexpr int64_t kLanesOfBlock = Scales<format>::kBlock / kNibbles;
  for (int i = 0; i < kLanes; ++i) {
    if (!Scales<format>::Nan(chunk.bytes >> (8 * (i / kLanesOfBlock)) & 255)) continue;
    for (int n = 0; n < kNibbles; ++n) to[n * kLanes + i] = kNan;
  }
}

}  // namespace
}  // namespace jaxlab
