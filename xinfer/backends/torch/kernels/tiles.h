// Products of some rows of bfloat16 with a matrix that lies as checkpoints have it, [out, in], where the processor adds
// up the products of pairs by itself.
//
// A library lays the matrix out anew in every call, which for few rows takes as long as the products. Here four rows of
// the matrix, once they are in the caches, meet all rows of x, four at a time.
#pragma once

#include <ATen/Parallel.h>

#include "lanes.h"

namespace xinfer {

constexpr int64_t kMostRows = 48;  // beyond, laying the matrix out pays
constexpr int64_t kSide = 4;       // of a tile
constexpr int64_t kPairs = 32;     // numbers in sixteen pairs

#if defined(__AVX512BF16__)

constexpr bool kTiles = true;

// to[m, n] = sum of x[m, :] * w[n, :], of a tile that begins at x, w and to. Of what is beyond `rows` and `outs`, the
// last ones are computed again and left.
inline void tile(const c10::BFloat16* x, int64_t rows, const c10::BFloat16* w, int64_t outs, int64_t columns, float* to,
                 int64_t out) {
  const c10::BFloat16 *xs[kSide], *ws[kSide];
  for (int64_t i = 0; i < kSide; i++) {
    xs[i] = x + std::min(i, rows - 1) * columns;
    ws[i] = w + std::min(i, outs - 1) * columns;
  }
  __m512 sums[kSide][kSide] = {};
  int64_t i = 0;
  for (; i + kPairs <= columns; i += kPairs) {
    __m512bh row[kSide];
#pragma GCC unroll 4
    for (int64_t n = 0; n < kSide; n++) row[n] = (__m512bh)_mm512_loadu_si512(ws[n] + i);
#pragma GCC unroll 4
    for (int64_t m = 0; m < kSide; m++) {
      const __m512bh own = (__m512bh)_mm512_loadu_si512(xs[m] + i);
#pragma GCC unroll 4
      for (int64_t n = 0; n < kSide; n++) sums[m][n] = _mm512_dpbf16_ps(sums[m][n], own, row[n]);
    }
  }
  if (i < columns) {
    const __mmask32 mask = (__mmask32{1} << (columns - i)) - 1;
    for (int64_t m = 0; m < kSide; m++) {
      const __m512bh own = (__m512bh)_mm512_maskz_loadu_epi16(mask, xs[m] + i);
      for (int64_t n = 0; n < kSide; n++)
        sums[m][n] = _mm512_dpbf16_ps(sums[m][n], own, (__m512bh)_mm512_maskz_loadu_epi16(mask, ws[n] + i));
    }
  }
  Lanes each[kLanes];
  std::memcpy(each, sums, sizeof each);
  const Lanes found = totals(each);
  Four parts[kSide];
  std::memcpy(parts, &found, sizeof parts);
  for (int64_t m = 0; m < std::min(kSide, rows); m++)
    std::memcpy(to + m * out, &parts[m], outs < kSide ? outs * sizeof(float) : sizeof parts[m]);
}

// to[m, n] = sum of x[m, :] * w[n, :].
inline void tiled(const c10::BFloat16* x, int64_t rows, const c10::BFloat16* w, int64_t outs, int64_t columns, float* to) {
  const int64_t share = std::max<int64_t>(1, (1 << 13) / columns);
  at::parallel_for(0, (outs + kSide - 1) / kSide, share, [&](int64_t first, int64_t end) {
    for (int64_t n = first * kSide; n < std::min(end * kSide, outs); n += kSide) {
      const char* next = reinterpret_cast<const char*>(w + (n + kSide) * columns);
      const int64_t bytes = kSide * columns * 2, groups = (rows + kSide - 1) / kSide, part = (bytes + groups - 1) / groups;
      for (int64_t m = 0, group = 0; m < rows; m += kSide, group++) {
        for (int64_t at = group * part; at < std::min(bytes, (group + 1) * part); at += 64) __builtin_prefetch(next + at);
        tile(x + m * columns, rows - m, w + n * columns, outs - n, columns, to + m * outs + n, outs);
      }
    }
  });
}

#else

constexpr bool kTiles = false;

inline void tiled(const c10::BFloat16*, int64_t, const c10::BFloat16*, int64_t, int64_t, float*) {}

#endif

}  // namespace xinfer
