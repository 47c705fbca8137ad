// Products of a few rows with codes of four bits, where the processor adds up the products of pairs of bfloat16.
//
// Codes are looked up as numbers of bfloat16, which takes four instructions for 64 weights. A number of x is one of
// bfloat16, or the sum of two or three, as those of float16 and float32 are, so that nothing is rounded. x is laid out
// as codes are.
#pragma once

#include <array>
#include <bit>
#include <vector>

#include "codes.h"
#include "sharing.h"

namespace xinfer {

#if defined(__AVX512BF16__)

constexpr bool kNibbles = true;

// Of 32 bytes the low nibbles are multiplied with one vector of x, the high ones with another.
constexpr int64_t kBytes = 32;

// The numbers from 0 to 15, twice, since a fifth bit of what is looked up may be anything.
constexpr std::array<uint16_t, kPairs> numbers_of_nibbles() {
  std::array<uint16_t, kPairs> numbers;
  for (int i = 0; i < kPairs; i++) numbers[i] = std::bit_cast<uint32_t>(static_cast<float>(i % 16)) >> 16;
  return numbers;
}

alignas(64) constexpr std::array<uint16_t, kPairs> kNumbers = numbers_of_nibbles();

// Rows of x for one product.
struct Operands {
  const c10::BFloat16* numbers;  // [rows, chunks, low and high, parts, 32]
  const float* sums;             // [rows, blocks], of each block's numbers
  int64_t row;                   // numbers of a row
};

// Lays out a row of x, sixteen bytes at a time, whose low nibbles belong to sixteen numbers that lie together.
template <int kParts, class T>
void lay_out(const Codes& matrix, const T* x, int64_t columns, c10::BFloat16* to, float* sums) {
  const int64_t half = matrix.block / 2;
  for (int64_t byte = 0; byte < matrix.blocks * half; byte += kLanes) {
    for (int64_t high = 0; high < 2; high++) {
      const int64_t block = byte / half, at = block * matrix.block + high * half + byte % half;
      Lanes rest = load(x + at, columns - at);
      sums[block] += total(rest);
      for (int64_t part = 0; part < kParts; part++) {
        c10::BFloat16* place = to + ((byte / kBytes * 2 + high) * kParts + part) * kPairs + byte % kBytes;
        store(rest, place);
        rest -= load(place);
      }
    }
  }
}

// What M rows of x, from `m` on, come to with N rows of the matrix, from `n` on: to[i * out + j].
template <int kParts, int M, int N, bool kNarrow>
void nibble_dots(const Codes& matrix, const Operands& x, int64_t m, int64_t n, float* to, int64_t out) {
  const int64_t blocks = matrix.blocks, bytes = blocks * matrix.block / 2;
  const uint8_t* w = matrix.codes + n * bytes;
  const float* scales = matrix.scales + n * blocks;
  const c10::BFloat16* own = x.numbers + m * x.row;
  const __m512i numbers = (__m512i)load_pairs(kNumbers.data());
  const __m512i places = _mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1);
  Lanes sums[N][M];
  for (int j = 0; j < N; j++)
    for (int i = 0; i < M; i++) sums[j][i] = -matrix.middle(n + j, x.sums + (m + i) * blocks);
  const auto add = [&](auto chunk_of, auto scale_of) __attribute__((always_inline)) {
    Lanes each[N][M][2] = {};
    __m512bh low[N], high[N];
    for (int j = 0; j < N; j++) {
      const __m512i codes = _mm512_cvtepu8_epi16(chunk_of(j));
      low[j] = (__m512bh)_mm512_permutexvar_epi16(codes, numbers);
      high[j] = (__m512bh)_mm512_permutexvar_epi16(_mm512_srli_epi16(codes, 4), numbers);
    }
    for (int i = 0; i < M; i++) {
      for (int part = 0; part < kParts; part++) {
        const c10::BFloat16* from = own + i * x.row + part * kPairs;
        const __m512bh first = load_pairs(from), second = load_pairs(from + kParts * kPairs);
        for (int j = 0; j < N; j++) {
          each[j][i][0] = add_products(each[j][i][0], first, low[j]);
          each[j][i][1] = add_products(each[j][i][1], second, high[j]);
        }
      }
    }
    for (int j = 0; j < N; j++) {
      const Lanes scale = scale_of(j);
      for (int i = 0; i < M; i++) sums[j][i] += (each[j][i][0] + each[j][i][1]) * scale;
    }
    own += 2 * kParts * kPairs;
  };
  int64_t byte = 0;
  for (; byte + kBytes <= bytes; byte += kBytes) {
    const auto chunk_of = [&](int j) {
      const uint8_t* from = w + j * bytes + byte;
      __builtin_prefetch(from + kAhead / 2);
      return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
    };
    const auto scale_of = [&](int j) {
      const float* from = scales + j * blocks;
      if constexpr (!kNarrow) return all(from[byte * 2 / matrix.block]);
      double both;
      std::memcpy(&both, from + byte / kLanes, sizeof both);
      return (Lanes)_mm512_permutexvar_ps(places, (__m512)_mm512_set1_pd(both));
    };
    add(chunk_of, scale_of);
  }
  if (byte < bytes) {  // of blocks of 32, an odd one
    const auto chunk_of = [&](int j) {
      return _mm256_zextsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(w + j * bytes + byte)));
    };
    add(chunk_of, [&](int j) { return all(scales[j * blocks + byte / kLanes]); });
  }
  for (int j = 0; j < N; j++)
    for (int i = 0; i < M; i++) to[i * out + j] = total(sums[j][i]);
}

// to[m, n] = sum of x[m, :] * matrix[n, :], for codes of four bits.
template <class T>
void multiply_nibbles(const Codes& matrix, const T* x, int64_t rows, int64_t columns, float* to, int64_t out) {
  constexpr int kParts = std::is_same_v<T, c10::BFloat16> ? 1 : std::is_same_v<T, c10::Half> ? 2 : 3;
  const int64_t chunks = (matrix.blocks * matrix.block / 2 + kBytes - 1) / kBytes;
  const int64_t row = chunks * 2 * kParts * kPairs;
  std::vector<Lanes> laid_out(rows * row / kPairs);  // which begin at a cache line
  std::vector<float> sums(rows * matrix.blocks);
  c10::BFloat16* numbers = reinterpret_cast<c10::BFloat16*>(laid_out.data());
  for (int64_t m = 0; m < rows; m++)
    lay_out<kParts>(matrix, x + m * columns, columns, numbers + m * row, &sums[m * matrix.blocks]);
  const Operands operands{numbers, sums.data(), row};
  const auto multiply = [&]<bool kNarrow>(std::bool_constant<kNarrow>) {
    share_out_rows(out, std::max<int64_t>(1, Codes::kLeast / columns), [&](int64_t first, int64_t end) {
      const auto dots = [&]<int M, int N>(int64_t m, int64_t n) {
        nibble_dots<kParts, M, N, kNarrow>(matrix, operands, m, n, to + m * out + n, out);
      };
      int64_t n = first;
      for (; n + 4 <= end; n += 4) {  // sixteen sums are too many for the registers
        int64_t m = 0;
        for (; m + 4 <= rows; m += 4) {
          dots.template operator()<4, 2>(m, n);
          dots.template operator()<4, 2>(m, n + 2);
        }
        for (; m + 2 <= rows; m += 2) dots.template operator()<2, 4>(m, n);
        if (m < rows) dots.template operator()<1, 4>(m, n);
      }
      for (; n < end; n++)
        for (int64_t m = 0; m < rows; m++) dots.template operator()<1, 1>(m, n);
    });
  };
  matrix.block == 2 * kLanes ? multiply(std::true_type()) : multiply(std::false_type());
}

#else

constexpr bool kNibbles = false;

template <class T>
void multiply_nibbles(const Codes&, const T*, int64_t, int64_t, float*, int64_t) {}

#endif

}  // namespace xinfer
