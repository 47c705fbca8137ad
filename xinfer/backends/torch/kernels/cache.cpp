// What tokens leave in a cache of codes.

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <cmath>

#include "step.h"

namespace xinfer {
namespace {

// Codes of up to `largest` of so many numbers, whose largest is that; a number that is none makes the scale none.
template <class T, class C>
float encode(const T* from, int64_t count, float largest, C* to) {
  float most = 0, faulty = 0;
  for (int64_t i = 0; i < count; i++) {
    const float number = static_cast<float>(from[i]);
    most = std::max(most, std::fabs(number));
    faulty += number * 0;
  }
  const float scale = std::max(most / largest, std::numeric_limits<float>::min());
  for (int64_t i = 0; i < count; i++) {
    const float code = static_cast<float>(from[i]) / scale;
    if constexpr (std::is_same_v<C, int8_t>) to[i] = static_cast<int8_t>(static_cast<int32_t>(std::nearbyint(code)));
    else to[i] = static_cast<C>(code);
  }
  return scale + faulty;
}

at::Tensor encode_entries(const at::Tensor& entries, int64_t dim, at::ScalarType dtype) {
  const at::Tensor given = entries.contiguous();
  const int64_t rows = given.size(0), width = given.size(1), heads = width / dim, scales = heads * sizeof(float);
  at::Tensor out = at::zeros({rows, (scales + width + 3) / 4 * 4}, given.options().dtype(dtype));
  const auto encode_all = [&]<class T, class C>(T, C) {
    const T* from = given.const_data_ptr<T>();
    C* to = out.mutable_data_ptr<C>();
    at::parallel_for(0, rows, std::max<int64_t>(1, (1 << 14) / width), [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; row++) {
        C* entry = to + row * out.size(1);
        for (int64_t head = 0; head < heads; head++) {
          const float largest = std::is_same_v<C, int8_t> ? 127 : 448;
          const float scale = encode(from + row * width + head * dim, dim, largest, entry + scales + head * dim);
          std::memcpy(entry + head * sizeof(float), &scale, sizeof scale);
        }
      }
    });
  };
  const auto encode_as = [&]<class T>(T number) {
    if (dtype == at::kChar) encode_all(number, int8_t());
    else encode_all(number, at::Float8_e4m3fn());
  };
  if (given.scalar_type() == at::kFloat) encode_as(float());
  else if (given.scalar_type() == at::kBFloat16) encode_as(at::BFloat16());
  else encode_as(at::Half());
  return out;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(xinfer, library) {
  library.def("encode_entries(Tensor entries, int dim, ScalarType dtype) -> Tensor");
}

TORCH_LIBRARY_IMPL(xinfer, CPU, library) {
  library.impl("encode_entries", TORCH_FN(encode_entries));
}

}  // namespace xinfer
