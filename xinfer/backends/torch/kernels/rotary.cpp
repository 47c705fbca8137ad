// Queries and keys turned by their positions, keys and values written to the cache.

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "lanes.h"
#include "sharing.h"

namespace xinfer {
namespace {

constexpr int64_t kNumbers = 1 << 13;  // that are worth a thread

// The first `width` of a head's dimensions are turned in pairs: next to each other, or half of the width apart.
template <class T>
void turn(const T* head, const T* cos, const T* sin, int64_t width, int64_t dim, bool interleaved, T* to) {
  const int64_t half = width / 2;
  if (interleaved || half % kLanes != 0) {
    for (int64_t i = 0; i < width; i++) {
      const int64_t other = interleaved ? i ^ 1 : (i + half) % width;
      to[i] = static_cast<T>(static_cast<float>(head[i]) * static_cast<float>(cos[i]) +
                             static_cast<float>(head[other]) * static_cast<float>(sin[i]));
    }
  } else {
    for (int64_t i = 0; i < half; i += kLanes) {
      const Lanes one = load(head + i), other = load(head + half + i);
      store(one * load(cos + i) + other * load(sin + i), to + i);
      store(other * load(cos + half + i) + one * load(sin + half + i), to + half + i);
    }
  }
  std::copy(head + width, head + dim, to + width);
}

// Queries [T, heads, D] of projections [T, heads + 2 * kv_heads, D]; the other two go to `slots` of the pool.
at::Tensor rotate_and_store(const at::Tensor& qkv, const at::Tensor& cos, const at::Tensor& sin, const at::Tensor& slots,
                            at::Tensor& pool, int64_t kv_heads, bool interleaved) {
  const at::Tensor given = qkv.contiguous(), cosines = cos.contiguous(), sines = sin.contiguous(), at = slots.contiguous();
  const int64_t rows = given.size(0), heads = given.size(1) - 2 * kv_heads, dim = given.size(2), width = cos.size(-1);
  TORCH_CHECK(pool.is_contiguous() && pool.scalar_type() == qkv.scalar_type() && pool.size(1) == 2 * kv_heads * dim,
              "a cache of ", pool.scalar_type(), " ", pool.sizes(), " has no room for such keys and values");
  at::Tensor queries = at::empty({rows, heads, dim}, given.options());
  const auto enter = [&]<class T>(T) {
    const T *from = given.const_data_ptr<T>(), *cosine = cosines.const_data_ptr<T>(), *sine = sines.const_data_ptr<T>();
    const int64_t* places = at.const_data_ptr<int64_t>();
    T *out = queries.mutable_data_ptr<T>(), *entries = pool.mutable_data_ptr<T>();
    share_out_rows(rows, std::max<int64_t>(1, kNumbers / (given.size(1) * dim)), [&](int64_t first, int64_t end) {
      for (int64_t row = first; row < end; row++) {
        TORCH_CHECK_INDEX(places[row] >= 0 && places[row] < pool.size(0), "slot ", places[row], " of ", pool.size(0));
        T* entry = entries + places[row] * pool.size(1);
        const T* own = from + row * given.size(1) * dim;
        for (int64_t h = 0; h < heads + kv_heads; h++)
          turn(own + h * dim, cosine + row * width, sine + row * width, width, dim, interleaved,
               h < heads ? out + (row * heads + h) * dim : entry + (h - heads) * dim);
        std::copy_n(own + (heads + kv_heads) * dim, kv_heads * dim, entry + kv_heads * dim);
      }
    });
  };
  if (given.scalar_type() == at::kFloat) enter(float());
  else if (given.scalar_type() == at::kBFloat16) enter(at::BFloat16());
  else enter(at::Half());
  return queries;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(xinfer, library) {
  library.def(
      "rotate_and_store(Tensor qkv, Tensor cos, Tensor sin, Tensor slots, Tensor(a!) pool, int kv_heads, "
      "bool interleaved) -> Tensor");
}

TORCH_LIBRARY_IMPL(xinfer, CPU, library) {
  library.impl("rotate_and_store", TORCH_FN(rotate_and_store));
}

}  // namespace xinfer
