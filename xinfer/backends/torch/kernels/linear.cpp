// Products of a few rows with a matrix that lies as checkpoints have it, [out, in], each weight read once.
//
// A library's GEMM wants its matrix rearranged, and reads it at a fraction of the memory's speed when there is one row.
// Here a row of the matrix is read along, several sums at a time. Many rows go to oneDNN, but for those of `tiles.h`.

#include <ATen/Dispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/linear.h>
#include <torch/library.h>

#include <optional>
#include <vector>

#include "codes.h"
#include "lanes.h"
#include "nibbles.h"
#include "sharing.h"
#include "tiles.h"

#define AT_DISPATCH_CASE_FLOAT(...)            \
  AT_DISPATCH_CASE(at::kFloat, __VA_ARGS__)    \
  AT_DISPATCH_CASE(at::kBFloat16, __VA_ARGS__) \
  AT_DISPATCH_CASE(at::kHalf, __VA_ARGS__)

namespace xinfer {
namespace {

constexpr int64_t kNear = 1024;    // bytes, from use back to prefetching of numbers; for all of SmolLM2's in float32 two
                                   // Zen 5 cores take 6.9 ms, 7.1 at 8192, 6.8 without; while others use the memory
                                   // 10.4, 10.4, 10.75
constexpr int64_t kSums = 4;       // of a row
constexpr int64_t kStretch = kSums * kLanes;
constexpr int64_t kPiece = 1 << 21;  // weights that are made from codes at a time

// A matrix of float32, bfloat16 or float16.
template <class T>
struct Plain {
  static constexpr int64_t kLeast = kShare;  // weights that a thread takes at a time

  const T* weights;
  int64_t columns;

  float dot(int64_t row, const float* x) const {
    const T* w = weights + row * columns;
    Lanes sums[kSums] = {};
    int64_t i = 0;
    for (; i + kStretch <= columns; i += kStretch) {
      for (size_t byte = 0; byte < kStretch * sizeof(T); byte += 64)
        __builtin_prefetch(reinterpret_cast<const char*>(w + i) + byte + kNear);
      for (int64_t j = 0; j < kSums; j++) sums[j] += load(w + i + j * kLanes) * load(x + i + j * kLanes);
    }
    float sum = total((sums[0] + sums[1]) + (sums[2] + sums[3]));
    for (; i < columns; i++) sum += static_cast<float>(w[i]) * x[i];
    return sum;
  }

  void widen(int64_t row, float* to) const {
    const T* w = weights + row * columns;
    int64_t i = 0;
    for (; i + kLanes <= columns; i += kLanes) store(load(w + i), to + i);
    for (; i < columns; i++) to[i] = static_cast<float>(w[i]);
  }
};

// The products of M rows x with one row of the matrix, `stride` numbers apart from each other; to[m * out].
template <int M>
void dots(const float* w, const float* x, int64_t columns, int64_t stride, float* to, int64_t out) {
  Lanes sums[M] = {}, others[M] = {};
  int64_t i = 0;
  for (; i + 2 * kLanes <= columns; i += 2 * kLanes) {
    const Lanes one = load(w + i), other = load(w + i + kLanes);
    for (int m = 0; m < M; m++) {
      sums[m] += one * load(x + m * stride + i);
      others[m] += other * load(x + m * stride + i + kLanes);
    }
  }
  for (int m = 0; m < M; m++) {
    float sum = total(sums[m] + others[m]);
    for (int64_t j = i; j < columns; j++) sum += w[j] * x[m * stride + j];
    to[m * out] = sum;
  }
}

// to[m, n] = sum of x[m, :] * matrix[n, :].
template <class Matrix>
void multiply(const Matrix& matrix, const float* x, int64_t rows, int64_t columns, float* to, int64_t out) {
  share_out_rows(out, std::max<int64_t>(1, Matrix::kLeast / columns), [&](int64_t first, int64_t end) {
    if (rows == 1) {
      for (int64_t n = first; n < end; n++) to[n] = matrix.dot(n, x);
      return;
    }
    std::vector<float> row(columns);
    for (int64_t n = first; n < end; n++) {
      matrix.widen(n, row.data());
      int64_t m = 0;
      for (; m + 4 <= rows; m += 4) dots<4>(row.data(), x + m * columns, columns, columns, to + m * out + n, out);
      for (; m < rows; m++) dots<1>(row.data(), x + m * columns, columns, columns, to + m * out + n, out);
    }
  });
}

// float32 [rows, columns] of x [rows, fewer], filled with 0.
at::Tensor widened(const at::Tensor& x, int64_t columns) {
  if (x.scalar_type() == at::kFloat && x.size(1) == columns) return x.contiguous();
  at::Tensor wide = at::empty({x.size(0), columns}, x.options().dtype(at::kFloat));
  if (x.size(1) < columns) wide.narrow(1, x.size(1), columns - x.size(1)).zero_();
  wide.narrow(1, 0, x.size(1)).copy_(x);
  return wide;
}

at::Tensor finished(at::Tensor product, const std::optional<at::Tensor>& bias, at::ScalarType type) {
  if (bias.has_value()) product.add_(*bias);
  return product.to(type);
}

// Whether products are computed in tiles: not where rows are to come out alike in any number (`few` is 0).
bool in_tiles(const at::Tensor& x, int64_t few) {
  return kTiles && x.scalar_type() == at::kBFloat16 && few > 0 && x.size(0) > 1;
}

at::Tensor many(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias, int64_t few) {
  if (in_tiles(x, few)) {
    const at::Tensor rows = x.contiguous();
    at::Tensor product = at::empty({x.size(0), weight.size(0)}, x.options());
    tiled({rows.const_data_ptr<at::BFloat16>(), weight.const_data_ptr<at::BFloat16>(),
           bias.has_value() ? bias->const_data_ptr<at::BFloat16>() : nullptr, product.mutable_data_ptr<at::BFloat16>(),
           x.size(0), weight.size(0), x.size(1)});
    return product;
  }
  if (x.scalar_type() != at::kFloat) return at::linear(x, weight, bias);
  using Signature = at::Tensor(const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&, c10::string_view,
                               at::List<std::optional<at::Scalar>>, std::optional<c10::string_view>);
  static const auto onednn = c10::Dispatcher::singleton()
                                 .findSchemaOrThrow("mkldnn::_linear_pointwise", "")
                                 .typed<Signature>();
  return onednn.call(x, weight, bias, "none", at::List<std::optional<at::Scalar>>(), "");
}

at::Tensor linear(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias, int64_t few) {
  if (x.size(0) > few || in_tiles(x, few)) return many(x, weight, bias, few);
  const int64_t rows = x.size(0), columns = x.size(1), out = weight.size(0);
  const at::Tensor wide = widened(x, columns);
  at::Tensor product = at::empty({rows, out}, wide.options());
  AT_DISPATCH_SWITCH(weight.scalar_type(), "linear", AT_DISPATCH_CASE_FLOAT([&] {
    const Plain<scalar_t> matrix{weight.const_data_ptr<scalar_t>(), columns};
    multiply(matrix, wide.const_data_ptr<float>(), rows, columns, product.mutable_data_ptr<float>(), out);
  }));
  return finished(product, bias, x.scalar_type());
}

// As `many`, of as many rows of the matrix at a time as stay in the caches.
at::Tensor many_codes(const Codes& matrix, const at::Tensor& x, int64_t out, int64_t columns, int64_t few) {
  const int64_t most = std::max<int64_t>(64, kPiece / columns);
  at::Tensor product = at::empty({x.size(0), out}, x.options());
  at::Tensor piece = at::empty({std::min(most, out), columns}, x.options());
  const at::Tensor filled = columns == x.size(1) ? x : at::constant_pad_nd(x, {0, columns - x.size(1)});
  for (int64_t from = 0; from < out; from += most) {
    const int64_t count = std::min(most, out - from);
    const at::Tensor rows = piece.narrow(0, 0, count);
    AT_DISPATCH_SWITCH(x.scalar_type(), "linear_codes", AT_DISPATCH_CASE_FLOAT([&] {
      scalar_t* to = rows.mutable_data_ptr<scalar_t>();
      share_out_rows(count, std::max<int64_t>(1, kShare / columns), [&](int64_t first, int64_t end) {
        for (int64_t n = first; n < end; n++) matrix.widen(from + n, to + n * columns);
      });
    }));
    const at::Tensor part = many(filled, rows, std::nullopt, few);
    if (count == out) return part;
    product.narrow(1, from, count).copy_(part);
  }
  return product;
}

Codes codes_of(const at::Tensor& codes, const at::Tensor& scales, const std::optional<at::Tensor>& zeros, int64_t bits) {
  const int64_t blocks = scales.size(1), columns = codes.size(1) * 8 / bits;
  return {codes.const_data_ptr<uint8_t>(), scales.const_data_ptr<float>(),
          zeros.has_value() ? zeros->const_data_ptr<uint8_t>() : nullptr, nullptr, bits, blocks, columns / blocks};
}

at::Tensor linear_codes(const at::Tensor& x, const at::Tensor& codes, const at::Tensor& scales,
                        const std::optional<at::Tensor>& zeros, const std::optional<at::Tensor>& bias, int64_t bits,
                        int64_t few) {
  const int64_t rows = x.size(0), out = codes.size(0), blocks = scales.size(1);
  Codes matrix = codes_of(codes, scales, zeros, bits);
  const int64_t columns = blocks * matrix.block;
  if (rows > few) return finished(many_codes(matrix, x, out, columns, few), bias, x.scalar_type());
  at::Tensor product = at::empty({rows, out}, scales.options());
  if (kNibbles && bits == 4) {
    const at::Tensor own = x.contiguous();
    AT_DISPATCH_SWITCH(x.scalar_type(), "linear_codes", AT_DISPATCH_CASE_FLOAT([&] {
      const scalar_t* from = own.const_data_ptr<scalar_t>();
      multiply_nibbles(matrix, from, rows, x.size(1), product.mutable_data_ptr<float>(), out);
    }));
    return finished(product, bias, x.scalar_type());
  }
  const at::Tensor wide = widened(x, columns);
  std::vector<float> sums(rows == 1 ? blocks : 0);
  const float* from = wide.const_data_ptr<float>();
  for (float& sum : sums) sum = sum_of(from, matrix.block), from += matrix.block;
  matrix.sums = sums.data();
  multiply(matrix, wide.const_data_ptr<float>(), rows, columns, product.mutable_data_ptr<float>(), out);
  return finished(product, bias, x.scalar_type());
}

// Rows of a matrix, float32 [n, columns] without what fills the last block.
at::Tensor rows_of_codes(const at::Tensor& codes, const at::Tensor& scales, const std::optional<at::Tensor>& zeros,
                         const at::Tensor& at, int64_t bits, int64_t columns) {
  const Codes matrix = codes_of(codes, scales, zeros, bits);
  const at::Tensor rows = at.to(at::kLong).contiguous();
  at::Tensor result = at::empty({at.size(0), columns}, scales.options());
  std::vector<float> row(matrix.blocks * matrix.block);
  for (int64_t i = 0; i < at.size(0); i++) {
    const int64_t own = rows.const_data_ptr<int64_t>()[i];
    TORCH_CHECK_INDEX(own >= 0 && own < codes.size(0), "row ", own, " of a matrix of ", codes.size(0));
    matrix.widen(own, row.data());
    std::copy_n(row.data(), columns, result.mutable_data_ptr<float>() + i * columns);
  }
  return result;
}

// The products of tokens with the matrices of the experts that each has chosen: [T, chosen, out] of x [T, in], or of
// [T, chosen, in], with chosen [T, chosen]. `product` multiplies rows with the matrix of one expert.
template <class Product>
at::Tensor by_expert(const at::Tensor& x, const at::Tensor& chosen, int64_t experts, int64_t out, Product product) {
  const at::Tensor each = chosen.to(at::kLong).contiguous(), rows = x.reshape({-1, x.size(-1)});
  const int64_t tokens = chosen.size(0), ranks = chosen.size(1);
  std::vector<std::vector<int64_t>> places(experts);
  for (int64_t i = 0; i < tokens * ranks; i++) places[each.const_data_ptr<int64_t>()[i]].push_back(i);
  at::Tensor result = at::empty({tokens * ranks, out}, x.options());
  for (int64_t e = 0; e < experts; e++) {
    if (places[e].empty()) continue;
    const at::Tensor own = at::from_blob(places[e].data(), {static_cast<int64_t>(places[e].size())}, at::kLong);
    const at::Tensor from = x.dim() == 3 ? own : own.floor_divide(ranks);
    result.index_copy_(0, own, product(rows.index_select(0, from), e));
  }
  return result.view({tokens, ranks, out});
}

at::Tensor experts(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& chosen, int64_t few) {
  return by_expert(x, chosen, weight.size(0), weight.size(1), [&](const at::Tensor& rows, int64_t e) {
    return linear(rows, weight.select(0, e), std::nullopt, few);
  });
}

at::Tensor experts_codes(const at::Tensor& x, const at::Tensor& codes, const at::Tensor& scales,
                         const std::optional<at::Tensor>& zeros, const at::Tensor& chosen, int64_t bits, int64_t few) {
  return by_expert(x, chosen, codes.size(0), codes.size(1), [&](const at::Tensor& rows, int64_t e) {
    const std::optional<at::Tensor> own = zeros.has_value() ? std::make_optional(zeros->select(0, e)) : std::nullopt;
    return linear_codes(rows, codes.select(0, e), scales.select(0, e), own, std::nullopt, bits, few);
  });
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(xinfer, library) {
  library.def("rows_of_codes(Tensor codes, Tensor scales, Tensor? zeros, Tensor at, int bits, int columns) -> Tensor");
  library.def("experts(Tensor x, Tensor weight, Tensor chosen, int few) -> Tensor");
  library.def(
      "experts_codes(Tensor x, Tensor codes, Tensor scales, Tensor? zeros, Tensor chosen, int bits, int few) -> Tensor");
  library.def("linear(Tensor x, Tensor weight, Tensor? bias, int few) -> Tensor");
  library.def(
      "linear_codes(Tensor x, Tensor codes, Tensor scales, Tensor? zeros, Tensor? bias, int bits, int few) -> Tensor");
}

TORCH_LIBRARY_IMPL(xinfer, CPU, library) {
  library.impl("rows_of_codes", TORCH_FN(rows_of_codes));
  library.impl("experts", TORCH_FN(experts));
  library.impl("experts_codes", TORCH_FN(experts_codes));
  library.impl("linear", TORCH_FN(linear));
  library.impl("linear_codes", TORCH_FN(linear_codes));
}

}  // namespace xinfer
