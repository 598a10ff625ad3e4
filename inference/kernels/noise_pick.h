// The pick with position-keyed Gumbel noise for decoding on CPUs.
//
// Meaning: `inference.kernels.reference.noise.noise_pick`, in float32, with the same bits. A column
// that cannot win is not computed: noise of the bits u is at most log(1 / v) for v = u / 2^32, and
// the exponent of u bounds that within a factor of two of v, so a few columns of thousands are left
// whose noise takes two logarithms. Rounding is monotone, so no column is lost to it.
//
// Included in the C++ of compiled steps by `inference.kernels.cpu_noise_pick`.
//
// Legend: B rows, N nodes, V columns.

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

namespace headstart {

// The code around inductor's kernels, where this stands, is compiled with little optimisation: what
// runs long asks for more.
#if defined(__clang__)
#define HEADSTART_NOISE_FAST
#else
#define HEADSTART_NOISE_FAST __attribute__((optimize("O3")))
#endif
constexpr float kLog2 = 0.69315f;  // a little above the logarithm of 2: bounds stay bounds

inline __attribute__((always_inline)) uint32_t mix_bits(uint32_t x) {
  x ^= x >> 16;
  x *= 0x21F0AAADu;
  x ^= x >> 15;
  x *= 0x735A2D97u;
  return x ^ (x >> 15);
}

struct NoiseKeys {
  uint32_t a, b;
  NoiseKeys(int64_t seed, int64_t position) {
    const uint32_t low = static_cast<uint32_t>(seed), high = static_cast<uint32_t>(seed >> 32);
    const uint32_t where = static_cast<uint32_t>(position);
    a = mix_bits(where ^ mix_bits(low ^ 0x3C6EF372u));
    b = mix_bits(a ^ mix_bits(high + 0x1B873593u) ^ (where * 0x2545F491u));
  }
  __attribute__((always_inline)) uint32_t bits(uint32_t token) const {
    return mix_bits(mix_bits((token * 0x9E3779B1u) ^ a) + b);
  }
};

inline float gumbel_of(uint32_t bits) {
  float v = (static_cast<float>(bits) + 0.5f) * 2.3283064365386963e-10f;
  v = v > 1 - 5.9604644775390625e-08f ? 1 - 5.9604644775390625e-08f : v;
  return -std::log(-std::log1p(-v));
}

// The column of one node. logits [V]; tokens [V], or null for 0..V-1; bounds: space for V floats.
HEADSTART_NOISE_FAST inline int64_t pick_column(const float* logits, int64_t columns, const int64_t* tokens,
                                                float temperature, NoiseKeys keys, float* bounds) {
  int32_t missing = 0;
  for (int64_t v = 0; v < columns; ++v) {
    const uint32_t token = tokens ? static_cast<uint32_t>(tokens[v]) : static_cast<uint32_t>(v);
    const float rounded = static_cast<float>(keys.bits(token));
    int32_t word;
    std::memcpy(&word, &rounded, sizeof(word));
    const float scaled = logits[v] / temperature;
    missing |= scaled != scaled;
    bounds[v] = scaled + static_cast<float>(159 - (word >> 23)) * kLog2;
  }
  if (missing)
    for (int64_t v = 0; v < columns; ++v)
      if (logits[v] != logits[v]) return v;
  int64_t best = 0;
  for (int64_t v = 1; v < columns; ++v) best = bounds[v] > bounds[best] ? v : best;
  const auto exact = [&](int64_t v) {
    const uint32_t token = tokens ? static_cast<uint32_t>(tokens[v]) : static_cast<uint32_t>(v);
    return logits[v] / temperature + gumbel_of(keys.bits(token));
  };
  const float reached = exact(best);
  float highest = -std::numeric_limits<float>::infinity();
  int64_t column = 0;
  for (int64_t v = 0; v < columns; ++v) {
    if (!(bounds[v] >= reached)) continue;
    const float value = exact(v);
    if (value > highest) highest = value, column = v;  // of equal ones the first
  }
  return column;
}

inline AtenTensorHandle noise_pick(AtenTensorHandle logits, AtenTensorHandle positions,
                                   AtenTensorHandle seeds, double temperature,
                                   AtenTensorHandle* token_ids) {
  void *values, *places, *keys, *picks, *tokens = nullptr;
  int64_t *size, *step, *place_step, *key_step;
  aoti_torch_get_data_ptr(logits, &values);
  aoti_torch_get_sizes(logits, &size);
  aoti_torch_get_strides(logits, &step);
  aoti_torch_get_data_ptr(positions, &places);
  aoti_torch_get_strides(positions, &place_step);
  aoti_torch_get_data_ptr(seeds, &keys);
  aoti_torch_get_strides(seeds, &key_step);
  if (token_ids) aoti_torch_get_data_ptr(*token_ids, &tokens);
  const int64_t rows = size[0], nodes = size[1], columns = size[2];
  const int64_t out_size[2] = {rows, nodes}, out_step[2] = {nodes, 1};
  AtenTensorHandle out;
  aoti_torch_empty_strided(2, out_size, out_step, aoti_torch_dtype_int64(), aoti_torch_device_type_cpu(),
                           0, &out);
  aoti_torch_get_data_ptr(out, &picks);
#pragma omp parallel for if (rows * nodes > 1 && rows * nodes * columns > (1 << 16))
  for (int64_t i = 0; i < rows * nodes; ++i) {
    static thread_local std::vector<float> bounds;
    bounds.resize(columns);
    const int64_t row = i / nodes, node = i % nodes;
    const NoiseKeys own(static_cast<int64_t*>(keys)[row * key_step[0]],
                        static_cast<int64_t*>(places)[row * place_step[0] + node * place_step[1]]);
    static_cast<int64_t*>(picks)[i] =
        pick_column(static_cast<float*>(values) + row * step[0] + node * step[1], columns,
                    static_cast<int64_t*>(tokens), static_cast<float>(temperature), own, bounds.data());
  }
  return out;
}

}  // namespace headstart
