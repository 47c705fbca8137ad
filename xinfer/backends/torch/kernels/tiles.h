// Products of several rows of bfloat16 with a matrix that lies as checkpoints have it, [out, in], where the processor
// adds up the products of pairs by itself.
//
// A library lays the matrix out anew in every call. Here the rows of x are: sixteen of them lie across the lanes of a
// vector, pair by pair, so that the matrix is read along, each pair for all lanes at once, and sums are totals already
// (`panel`). A few rows would leave lanes empty; they lie as they are, and sixteen sums are added up across their lanes
// (`tile`). Two Zen 5 cores multiply 32 rows at 750 and 512 at 950 of at most 1,100 GFLOP/s.
#pragma once

#include <ATen/ops/empty.h>

#include "lanes.h"
#include "sharing.h"

namespace xinfer {

// to[m, n] = sum of x[m, :] * w[n, :], and bias[n] if there is one.
struct Product {
  const c10::BFloat16 *x, *w, *bias;
  c10::BFloat16* to;
  int64_t rows, outs, columns;
};

#if defined(__AVX512BF16__)

constexpr bool kTiles = true;
constexpr int64_t kSide = 4;              // of a tile
constexpr int64_t kAcross = 2;            // vectors of a panel: 28 sums, two of x and one of w are 31 of 32 registers
constexpr int64_t kPanel = kAcross * kLanes;
constexpr int64_t kOuts = 14;
constexpr int64_t kFew = 24;              // rows that tiles take less time for than a panel
constexpr int64_t kChunk = 512;           // rows that meet the whole matrix, of which they read what lies in the caches
constexpr int64_t kBlock = 1 << 19;       // bytes of the matrix that meet all panels of a chunk

inline void store(Lanes lanes, c10::BFloat16* to, __mmask16 mask) {
  _mm256_mask_storeu_epi16(to, mask, (__m256i)_mm512_cvtneps_pbh((__m512)lanes));
}

// A tile of rows from `m` and outs from `n` up to `end` at most.
inline void tile(const Product& p, int64_t m, int64_t n, int64_t end) {
  const int64_t rows = std::min(kSide, p.rows - m), outs = std::min(kSide, end - n);
  const c10::BFloat16 *xs[kSide], *ws[kSide];  // beyond those that there are, the last ones again
  for (int64_t i = 0; i < kSide; i++) {
    xs[i] = p.x + (m + std::min(i, rows - 1)) * p.columns;
    ws[i] = p.w + (n + std::min(i, outs - 1)) * p.columns;
  }
  Lanes sums[kSide][kSide] = {};
  const auto add = [&](auto take) __attribute__((always_inline)) {
    __m512bh row[kSide];
#pragma GCC unroll 4
    for (int64_t j = 0; j < kSide; j++) row[j] = take(ws[j]);
#pragma GCC unroll 4
    for (int64_t i = 0; i < kSide; i++) {
      const __m512bh own = take(xs[i]);
#pragma GCC unroll 4
      for (int64_t j = 0; j < kSide; j++) sums[i][j] = add_products(sums[i][j], own, row[j]);
    }
  };
  int64_t k = 0;
  for (; k + kPairs <= p.columns; k += kPairs) add([&](const c10::BFloat16* from) { return load_pairs(from + k); });
  if (k < p.columns) add([&](const c10::BFloat16* from) { return load_pairs(from + k, p.columns - k); });
  Lanes each[kLanes];
  std::memcpy(each, sums, sizeof each);
  float found[kSide][kSide];
  store(totals(each), found[0]);
  for (int64_t i = 0; i < rows; i++)
    for (int64_t j = 0; j < outs; j++)
      p.to[(m + i) * p.outs + n + j] = found[i][j] + (p.bias == nullptr ? 0.0f : static_cast<float>(p.bias[n + j]));
}

// Up to 32 rows for `panel`: of each pair of columns one vector for each sixteen.
inline void lay_out(const c10::BFloat16* x, int64_t rows, int64_t columns, float* to) {
  for (int64_t v = 0; v < kAcross; v++) {
    for (int64_t k = 0; k < columns; k += kPairs) {
      const int64_t count = std::min(kPairs, columns - k);
      Lanes block[kLanes] = {};
      for (int64_t i = 0; i < std::min(kLanes, rows - v * kLanes); i++)
        block[i] = (Lanes)load_pairs(x + (v * kLanes + i) * columns + k, count);
      transpose(block);
      for (int64_t i = 0; i < (count + 1) / 2; i++) store(block[i], to + ((k / 2 + i) * kAcross + v) * kLanes);
    }
  }
}

// Rows from `m` that are laid out, and outs from `n`, or as many before it as are missing at the end of the matrix.
inline void panel(const Product& p, const float* x, int64_t m, int64_t n, bool prefetch) {
  const int64_t first = std::min(n, p.outs - kOuts), columns = p.columns;
  const c10::BFloat16 *w = p.w + first * columns, *next = w + kOuts * columns;
  Lanes sums[kOuts][kAcross] = {};
  const auto add = [&](int64_t k, int bytes) __attribute__((always_inline)) {
    __m512bh own[kAcross];
#pragma GCC unroll 2
    for (int64_t v = 0; v < kAcross; v++) own[v] = load_pairs(x + (k / 2 * kAcross + v) * kLanes);
#pragma GCC unroll 14
    for (int64_t j = 0; j < kOuts; j++) {
      uint32_t pair = 0;
      std::memcpy(&pair, w + j * columns + k, bytes);
      const __m512bh each = all_pairs(pair);
#pragma GCC unroll 2
      for (int64_t v = 0; v < kAcross; v++) sums[j][v] = add_products(sums[j][v], own[v], each);
    }
  };
  int64_t k = 0;
  for (; k + kPairs <= columns; k += kPairs) {
    if (prefetch) {
#pragma GCC unroll 14
      for (int64_t j = 0; j < kOuts; j++) __builtin_prefetch(next + j * columns + k);
    }
    for (int64_t i = k; i < k + kPairs; i += 2) add(i, 4);
  }
  for (; k + 2 <= columns; k += 2) add(k, 4);
  if (k < columns) add(k, 2);
  const __mmask16 mask = ((1 << kOuts) - 1) & ~((1 << (n - first)) - 1);
#pragma GCC unroll 2
  for (int64_t v = 0; v < kAcross; v++) {
    Lanes each[kLanes] = {};
#pragma GCC unroll 14
    for (int64_t j = 0; j < kOuts; j++)
      each[j] = sums[j][v] + (p.bias == nullptr ? 0.0f : static_cast<float>(p.bias[first + j]));
    transpose(each);
    for (int64_t i = 0, row = m + v * kLanes; i < std::min(kLanes, p.rows - row); i++)
      store(each[i], p.to + (row + i) * p.outs + first, mask);
  }
}

inline void tiled(const Product& p) {
  const int64_t panels = p.outs < kOuts ? 0 : (p.rows + kPanel - 1 - kFew) / kPanel, whole = std::min(p.rows, panels * kPanel);
  const int64_t size = (p.columns + 1) / 2 * kPanel, threads = at::get_num_threads();
  const at::Tensor laid_out = at::empty({panels * size}, at::kFloat);
  float* x = laid_out.mutable_data_ptr<float>();
  if (panels > 0)
    share_out(panels, [&](int64_t i) {
      lay_out(p.x + i * kPanel * p.columns, p.rows - i * kPanel, p.columns, x + i * size);
    });
  const int64_t step = panels > 0 ? kOuts : kSide, steps = (p.outs + step - 1) / step;
  const int64_t most = panels > 1 ? std::max<int64_t>(1, kBlock / (step * p.columns * 2)) : 4 * kOuts / step;
  const int64_t blocks = std::min(steps, threads * ((steps + threads * most - 1) / (threads * most)));
  const int64_t chunks = std::max<int64_t>(1, (p.rows + kChunk - 1) / kChunk);
  share_out(chunks * blocks, [&](int64_t unit) {
    const int64_t own = unit % blocks, first = own * steps / blocks * step, chunk = unit / blocks * kChunk;
    const int64_t end = std::min(p.outs, (own + 1) * steps / blocks * step);
    for (int64_t m = chunk; m < std::min(whole, chunk + kChunk); m += kPanel)
      for (int64_t n = first; n < end; n += kOuts) panel(p, x + m / kPanel * size, m, n, m == chunk);
    if (chunk + kChunk < p.rows) return;
    for (int64_t n = first; n < end; n += kSide) {
      const char* next = reinterpret_cast<const char*>(p.w + (n + kSide) * p.columns);
      const int64_t bytes = kSide * p.columns * 2, groups = (p.rows - whole + kSide - 1) / kSide;
      for (int64_t m = whole, group = 0; m < p.rows; m += kSide, group++) {
        for (int64_t at = group * bytes / groups; at < (group + 1) * bytes / groups; at += 64) __builtin_prefetch(next + at);
        tile(p, m, n, end);
      }
    }
  });
}

#else

constexpr bool kTiles = false;

inline void tiled(const Product&) {}

#endif

}  // namespace xinfer
