// The loops, for the instruction set whose `Lanes` the including unit has chosen.
//
// An entry of y is a sum over vectors of lanes, and over the lanes once at the end. For few rows of
// x codes are decoded in registers; for more, a tile of W is decoded once, then multiplied in
// float32.
// Everything is in an anonymous namespace, so that no unit uses another one's instructions.
#pragma once

#include "packed.h"

namespace jaxlab {
namespace {

constexpr int kRowsW = 4;              // rows of W that share the loads of x
constexpr int kGroups = 8;             // groups of kRowsW rows in a tile, at most
constexpr int64_t kTileFloats = 1 << 16;  // a tile stays in the second-level cache
constexpr int64_t kDepth = 1024;       // columns in a step over a tile: six rows of x are 24 KiB

// Four rows of W from `begin` on; at the end of the matrix the last one is repeated.
struct FourRows {
  int64_t o[kRowsW];
  int count;
  FourRows(int64_t begin, int64_t end) : count(int(Min<int64_t>(kRowsW, end - begin))) {
    for (int r = 0; r < kRowsW; ++r) o[r] = begin + Min(r, count - 1);
  }
};

// Sums of four rows of W for each of kM rows of x.
template <int kM>
struct Sums {
  Lanes::F of[kM][kRowsW];
  JAXLAB_INLINE Sums() {
    for (int m = 0; m < kM; ++m) {
      for (int r = 0; r < kRowsW; ++r) of[m][r] = Lanes::Zero();
    }
  }
  void OverLanes(float (*to)[kRowsW]) const {
    for (int m = 0; m < kM; ++m) Lanes::Sum4(of[m][0], of[m][1], of[m][2], of[m][3], to[m]);
  }
};

inline void PutSums(const FourRows& rows, const float (*sums)[kRowsW], int count, float multiplier,
                    const Array& y, int64_t first) {
  if (y.dtype == Dtype::kFloat32 && rows.count == kRowsW) {
    for (int m = 0; m < count; ++m) {
      float four[kRowsW];
      for (int r = 0; r < kRowsW; ++r) four[r] = sums[m][r] * multiplier;
      float* to = static_cast<float*>(y.data) + (first + m) * y.columns + rows.o[0];
      __builtin_memcpy(to, four, sizeof(four));
    }
    return;
  }
  for (int m = 0; m < count; ++m) {
    for (int r = 0; r < rows.count; ++r) Put(y, first + m, rows.o[r], sums[m][r] * multiplier);
  }
}

// fn(Count<kM>(), first) for groups of at most kMost of `rows` rows, as equal as possible.
template <int kM>
struct Count {
  static constexpr int value = kM;
};

template <int kMost, class Fn>
void EachGroup(int64_t rows, Fn fn) {
  const int64_t groups = (rows + kMost - 1) / kMost;
  for (int64_t g = 0; g < groups; ++g) {
    const int64_t first = g * rows / groups;
    switch ((g + 1) * rows / groups - first) {
      case 1: fn(Count<1>(), first); break;
      case 2: fn(Count<Min(2, kMost)>(), first); break;
      case 3: fn(Count<Min(3, kMost)>(), first); break;
      case 4: fn(Count<Min(4, kMost)>(), first); break;
      case 5: fn(Count<Min(5, kMost)>(), first); break;
      default: fn(Count<Min(6, kMost)>(), first);
    }
  }
}

// --- few rows of x

template <Format format, int kM>
JAXLAB_INLINE inline uint64_t AddChunk(const Packed& w, const FourRows& rows, int64_t c,
                                       int64_t columns, const float* x, int64_t stride,
                                       Sums<kM>& sums) {
  const Chunk<format> chunk[kRowsW] = {{w, rows.o[0], c, columns},
                                       {w, rows.o[1], c, columns},
                                       {w, rows.o[2], c, columns},
                                       {w, rows.o[3], c, columns}};
#pragma GCC unroll 4
  for (int r = 0; r < kRowsW; ++r) Prefetch<format>(w, rows.o[r], c);
  Sums<kM> part;
  EachNibble([&](auto n) JAXLAB_INLINE {  // the four rows are in step: four chains of sums
    constexpr int kN = decltype(n)::value;
    Lanes::F xn[kM];
#pragma GCC unroll 4
    for (int m = 0; m < kM; ++m) xn[m] = Lanes::Load(x + m * stride + kN * kLanes);
#pragma GCC unroll 4
    for (int r = 0; r < kRowsW; ++r) {
      const Lanes::F value = Lanes::Value<kN>(chunk[r].codes);
#pragma GCC unroll 4
      for (int m = 0; m < kM; ++m) part.of[m][r] = Lanes::MulAdd(value, xn[m], part.of[m][r]);
    }
  });
  uint64_t nan = 0;
#pragma GCC unroll 4
  for (int r = 0; r < kRowsW; ++r) {
    nan |= Scales<format>::Nan(chunk[r].bytes);
#pragma GCC unroll 4
    for (int m = 0; m < kM; ++m) {
      sums.of[m][r] = Lanes::MulAdd(part.of[m][r], chunk[r].scale, sums.of[m][r]);
    }
  }
  return nan;
}

template <Format format>
void MarkNan(const Packed& w, const FourRows& rows, float (*sums)[kRowsW], int count) {
  for (int r = 0; r < rows.count; ++r) {
    if (!RowHasNan<format>(w, rows.o[r])) continue;
    for (int m = 0; m < count; ++m) sums[m][r] = kNan;
  }
}

template <Format format, int kM>
void ForwardDirect(const Packed& w, const Rows& x, int64_t first, const Array& y, Range out) {
  const int64_t whole = w.in / kChunk, rest = w.in % kChunk;
  const float* x_first = x.data + first * x.stride;
  for (int64_t o = out.begin; o < out.end; o += kRowsW) {
    const FourRows rows(o, out.end);
    Sums<kM> sums;
    uint64_t nan = 0;
    for (int64_t c = 0; c < whole; ++c) {
      nan |= AddChunk<format, kM>(w, rows, c, kChunk, x_first + c * kChunk, x.stride, sums);
    }
    if (rest) {
      const float* x_last = x_first + whole * kChunk;
      nan |= AddChunk<format, kM>(w, rows, whole, rest, x_last, x.stride, sums);
    }
    float totals[kM][kRowsW];
    sums.OverLanes(totals);
    if (nan) MarkNan<format>(w, rows, totals, kM);
    PutSums(rows, totals, kM, w.multiplier * Scales<format>::kUnit, y, first);
  }
}

template <Format format, int kM>
JAXLAB_INLINE inline uint64_t AddInt8Chunk(const Packed& w, const FourRows& rows, int64_t c,
                                           int64_t columns, const Int8Chunk* x, int64_t stride,
                                           Sums<kM>& sums) {
  uint64_t nan = 0;
#pragma GCC unroll 4
  for (int r = 0; r < kRowsW; ++r) {
    Prefetch<format>(w, rows.o[r], c);
    const Chunk<format> chunk(w, rows.o[r], c, columns);
    nan |= Scales<format>::Nan(chunk.bytes);
#pragma GCC unroll 4
    for (int m = 0; m < kM; ++m) {
      const Int8Chunk& xm = x[m * stride];
      const Lanes::F scale = Lanes::Mul(chunk.scale, Lanes::Load(xm.scale));
      sums.of[m][r] = Lanes::MulAdd(Lanes::DotInt8(chunk.codes, xm), scale, sums.of[m][r]);
    }
  }
  return nan;
}

template <Format format, int kM>
void ForwardInt8(const Packed& w, const Int8Chunk* x, int64_t first, const Array& y, Range out) {
  const int64_t whole = w.in / kChunk, rest = w.in % kChunk, chunks = Chunks(w.in);
  const Int8Chunk* x_first = x + first * chunks;
  for (int64_t o = out.begin; o < out.end; o += kRowsW) {
    const FourRows rows(o, out.end);
    Sums<kM> sums;
    uint64_t nan = 0;
    for (int64_t c = 0; c < whole; ++c) {
      nan |= AddInt8Chunk<format, kM>(w, rows, c, kChunk, x_first + c, chunks, sums);
    }
    if (rest) nan |= AddInt8Chunk<format, kM>(w, rows, whole, rest, x_first + whole, chunks, sums);
    float totals[kM][kRowsW];
    sums.OverLanes(totals);
    if (nan) MarkNan<format>(w, rows, totals, kM);
    PutSums(rows, totals, kM, w.multiplier * Scales<format>::kUnit, y, first);
  }
}

constexpr int64_t kHeadAhead = 8192;  // into the second-level cache: twice as fast out of memory

template <int kM>
void HeadDirect(const Int8& w, const Rows& x, int64_t first, const Array& y, Range out) {
  const int64_t blocks = w.in / w.block, per_32 = w.block == 32;
  for (int64_t o = out.begin; o < out.end; o += kRowsW) {
    const FourRows rows(o, out.end);
    const int8_t* codes[kRowsW];
    const float* scale[kRowsW];
    for (int r = 0; r < kRowsW; ++r) {
      codes[r] = w.codes + rows.o[r] * w.in;
      scale[r] = w.scale + rows.o[r] * blocks;
    }
    Sums<kM> sums;
    for (int64_t b = 0; b < w.in / 32; ++b) {
      const float* xb = x.data + first * x.stride + 32 * b;
#pragma GCC unroll 4
      for (int r = 0; r < kRowsW; ++r) {
        if (b % 2 == 0) __builtin_prefetch(codes[r] + 32 * b + kHeadAhead, 0, 2);
        const Lanes::F low = Lanes::LoadInt8(codes[r] + 32 * b);
        const Lanes::F high = Lanes::LoadInt8(codes[r] + 32 * b + kLanes);
        const Lanes::F factor = Lanes::Fill(scale[r][b * per_32]);
#pragma GCC unroll 4
        for (int m = 0; m < kM; ++m) {
          const float* xm = xb + m * x.stride;
          const Lanes::F part = Lanes::MulAdd(high, Lanes::Load(xm + kLanes),
                                              Lanes::Mul(low, Lanes::Load(xm)));
          sums.of[m][r] = Lanes::MulAdd(part, factor, sums.of[m][r]);
        }
      }
    }
    float totals[kM][kRowsW];
    sums.OverLanes(totals);
    PutSums(rows, totals, kM, 1.f, y, first);
  }
}

// --- more rows of x: y[:, o] = multiplier * x @ tile.T

template <int kM>
void AddTile(const float* w, int64_t w_stride, const float* x, int64_t x_stride, int64_t columns,
             float (*totals)[kRowsW]) {
  Sums<kM> sums;
  for (int64_t k = 0; k < columns; k += kLanes) {
    Lanes::F row[kRowsW];
#pragma GCC unroll 4
    for (int r = 0; r < kRowsW; ++r) row[r] = Lanes::Load(w + r * w_stride + k);
#pragma GCC unroll 6
    for (int m = 0; m < kM; ++m) {
      const Lanes::F xm = Lanes::Load(x + m * x_stride + k);
#pragma GCC unroll 4
      for (int r = 0; r < kRowsW; ++r) sums.of[m][r] = Lanes::MulAdd(row[r], xm, sums.of[m][r]);
    }
  }
  float part[kM][kRowsW];
  sums.OverLanes(part);
  for (int m = 0; m < kM; ++m) {
    for (int r = 0; r < kRowsW; ++r) totals[m][r] += part[m][r];
  }
}

// decode(o, to): row o of W as x.columns values.
template <class Decode>
void ForwardTiles(const Rows& x, float multiplier, const Array& y, Range out, Decode decode) {
  const int64_t stride = Stride(x.columns);
  const int64_t groups = Min<int64_t>(kGroups, 1 + kTileFloats / (kRowsW * stride));
  float* tile = Scratch(groups * kRowsW * stride);
  for (int64_t begin = out.begin; begin < out.end; begin += groups * kRowsW) {
    const int64_t end = Min(out.end, begin + groups * kRowsW);
    for (int64_t o = begin; o < end; ++o) decode(o, tile + (o - begin) * stride);
    EachGroup<Lanes::kTileX>(x.count, [&](auto count, int64_t first) {
      constexpr int kM = decltype(count)::value;
      float totals[kGroups][kM][kRowsW] = {};
      for (int64_t k = 0; k < x.columns; k += kDepth) {
        for (int64_t o = begin; o < end; o += kRowsW) {
          AddTile<kM>(tile + (o - begin) * stride + k, stride, x.data + first * x.stride + k,
                      x.stride, Min(kDepth, x.columns - k), totals[(o - begin) / kRowsW]);
        }
      }
      for (int64_t o = begin; o < end; o += kRowsW) {
        PutSums(FourRows(o, end), totals[(o - begin) / kRowsW], kM, multiplier, y, first);
      }
    });
  }
}

template <Format format>
void Forward(const Packed& w, const Rows& x, const Array& y, Range out) {
  if (x.count <= Lanes::kDirect) {
    EachGroup<Lanes::kDirectX>(x.count, [&](auto count, int64_t first) {
      ForwardDirect<format, decltype(count)::value>(w, x, first, y, out);
    });
    return;
  }
  const float multiplier = w.multiplier * Scales<format>::kUnit;
  ForwardTiles(x, multiplier, y, out, [&](int64_t o, float* to) {
    for (int64_t c = 0; c < Chunks(w.in); ++c) {
      Prefetch<format>(w, o, c);
      DecodeChunk<format>(w, o, c, to + c * kChunk);
    }
  });
}

void Head(const Int8& w, const Rows& x, const Array& y, Range out) {
  if (x.count <= Lanes::kDirect) {
    EachGroup<Lanes::kDirectX>(x.count, [&](auto count, int64_t first) {
      HeadDirect<decltype(count)::value>(w, x, first, y, out);
    });
    return;
  }
  ForwardTiles(x, 1.f, y, out, [&](int64_t o, float* to) {
    for (int64_t k = 0; k < w.in; k += kLanes) {
      __builtin_prefetch(w.codes + o * w.in + k + kHeadAhead, 0, 2);
      const Lanes::F scale = Lanes::Fill(w.scale[(o * w.in + k) / w.block]);
      Lanes::Store(to + k, Lanes::Mul(Lanes::LoadInt8(w.codes + o * w.in + k), scale));
    }
  });
}

// --- dx = multiplier * dy @ W

constexpr int64_t kRowsTile = 32;  // rows of W decoded at once: a chunk of them is 16 KiB

// kM rows of dy, kN of a chunk's eight vectors.
template <int kM, int kN>
void AddOuter(const float* tile, int64_t tile_rows, const float* dy, int64_t stride, float* dx) {
  Lanes::F sums[kM][kN];
#pragma GCC unroll 3
  for (int m = 0; m < kM; ++m) {
#pragma GCC unroll 8
    for (int n = 0; n < kN; ++n) sums[m][n] = Lanes::Load(dx + m * kChunk + n * kLanes);
  }
  for (int64_t o = 0; o < tile_rows; ++o) {
    Lanes::F dy_o[kM];
#pragma GCC unroll 3
    for (int m = 0; m < kM; ++m) dy_o[m] = Lanes::Fill(dy[m * stride + o]);
#pragma GCC unroll 8
    for (int n = 0; n < kN; ++n) {
      const Lanes::F value = Lanes::Load(tile + o * kChunk + n * kLanes);
#pragma GCC unroll 3
      for (int m = 0; m < kM; ++m) sums[m][n] = Lanes::MulAdd(value, dy_o[m], sums[m][n]);
    }
  }
#pragma GCC unroll 3
  for (int m = 0; m < kM; ++m) {
#pragma GCC unroll 8
    for (int n = 0; n < kN; ++n) Lanes::Store(dx + m * kChunk + n * kLanes, sums[m][n]);
  }
}

template <Format format>
void Backward(const Packed& w, const Rows& dy, const Array& dx, int64_t chunk, Range rows) {
  const int64_t count = rows.end - rows.begin;
  float* tile = Scratch((kRowsTile + count) * kChunk);
  float* sums = tile + kRowsTile * kChunk;
  __builtin_memset(sums, 0, count * kChunk * sizeof(float));
  for (int64_t begin = 0; begin < w.out; begin += kRowsTile) {
    const int64_t tile_rows = Min(kRowsTile, w.out - begin);
    for (int64_t o = 0; o < tile_rows; ++o) {
      DecodeChunk<format>(w, begin + o, chunk, tile + o * kChunk);
    }
    EachGroup<Lanes::kOuterX>(count, [&](auto group, int64_t first) {
      const float* dy_first = dy.data + (rows.begin + first) * dy.stride + begin;
      for (int64_t n = 0; n < kChunk; n += Lanes::kOuterN * kLanes) {
        AddOuter<decltype(group)::value, Lanes::kOuterN>(tile + n, tile_rows, dy_first, dy.stride,
                                                         sums + first * kChunk + n);
      }
    });
  }
  const float multiplier = w.multiplier * Scales<format>::kUnit;
  const int64_t columns = Min(kChunk, w.in - chunk * kChunk);
  for (int64_t m = 0; m < count; ++m) {
    for (int64_t k = 0; k < columns; ++k) {
      const float sum = sums[m * kChunk + (k % kNibbles) * kLanes + k / kNibbles];
      Put(dx, rows.begin + m, chunk * kChunk + k, sum * multiplier);
    }
  }
}

// --- the dense matrix

// Rows `out` of value * scale (exact in bfloat16 too) into `to` [O, K], without the tensor scale.
template <Format format>
void DecodeRows(const Packed& w, const Array& to, Range out) {
  constexpr int64_t kBlock = Scales<format>::kBlock;
  for (int64_t o = out.begin; o < out.end; ++o) {
    const uint8_t* codes = w.codes + o * (w.in / 2);
    for (int64_t c = 0; c < Chunks(w.in); ++c) {
      const int64_t columns = Min(kChunk, w.in - c * kChunk);
      float scale[kLanes];
      const Chunk<format> chunk(w, o, c, columns);
      Lanes::Store(scale, chunk.scale);
      for (int64_t k = 0; k < columns; k += kLanes) {
        float one = scale[k / kNibbles] * Scales<format>::kUnit;
        if (Scales<format>::Nan(chunk.bytes >> (8 * (k / kBlock)) & 255)) one = kNan;
        const int64_t at = c * kChunk + k;
        const Lanes::F values = Lanes::Mul(Lanes::ValueInOrder(codes + at / 2), Lanes::Fill(one));
        if (to.dtype == Dtype::kFloat32) {
          Lanes::Store(static_cast<float*>(to.data) + o * w.in + at, values);
        } else {
          float exact[kLanes];
          Lanes::Store(exact, values);
          uint16_t* row = static_cast<uint16_t*>(to.data) + o * w.in + at;
          for (int i = 0; i < kLanes; ++i) row[i] = Bits(exact[i]) >> 16;
        }
      }
    }
  }
}

// --- by format

void ForwardAny(const Packed& w, const Rows& x, const Array& y, Range out) {
  const bool nv = w.format == Format::kNvfp4;
  nv ? Forward<Format::kNvfp4>(w, x, y, out) : Forward<Format::kMxfp4>(w, x, y, out);
}

void ForwardInt8Any(const Packed& w, const Int8Chunk* x, const Array& y, Range out) {
  EachGroup<Lanes::kInt8X>(y.rows, [&](auto count, int64_t first) {
    constexpr int kM = decltype(count)::value;
    const bool nv = w.format == Format::kNvfp4;
    nv ? ForwardInt8<Format::kNvfp4, kM>(w, x, first, y, out)
       : ForwardInt8<Format::kMxfp4, kM>(w, x, first, y, out);
  });
}

void BackwardAny(const Packed& w, const Rows& dy, const Array& dx, int64_t chunk, Range rows) {
  const bool nv = w.format == Format::kNvfp4;
  nv ? Backward<Format::kNvfp4>(w, dy, dx, chunk, rows)
     : Backward<Format::kMxfp4>(w, dy, dx, chunk, rows);
}

void DecodeAny(const Packed& w, const Array& to, Range out) {
  const bool nv = w.format == Format::kNvfp4;
  nv ? DecodeRows<Format::kNvfp4>(w, to, out) : DecodeRows<Format::kMxfp4>(w, to, out);
}

}  // namespace
}  // namespace jaxlab

#define JAXLAB_KERNELS                                                                     \
  {                                                                                        \
    Arrange, Widen, Round, ForwardAny, ForwardInt8Any, BackwardAny, DecodeAny, Head        \
  }
