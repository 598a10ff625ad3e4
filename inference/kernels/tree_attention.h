// Tree attention for decoding on CPUs: committed slots and ancestors are read, nothing else.
//
// Meaning: `inference.kernels.reference.attention.tree_attention`, in float32. The cache is cut into
// splits of a fixed size, which threads share; then the splits of a row are added up by their
// log-sum-exp. Where a split begins depends neither on the batch nor on the length, so a row's sums
// are taken in the same order alone and in a batch, with one thread and with many. Sixteen keys at
// a time are transposed in registers, and serve all query rows that share their head.
//
// Included in the C++ of compiled steps by `inference.kernels.cpu_tree_attention`. Vectors are those
// of GCC and Clang, which lower them to what the machine has.
//
// Legend: B rows, N nodes, Q queries, S slots, W words, h key/value heads, G query heads per
// key/value head, M = G * Q query rows of a key/value head, D head size, E value size.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>
#if defined(__AVX2__) || defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace headstart {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#else
constexpr int kLanes = 8;
#endif
// The code around inductor's kernels, where this stands, is compiled with little optimisation: what
// runs long asks for more.
#if defined(__clang__)
#define HEADSTART_FAST
#else
#define HEADSTART_FAST __attribute__((optimize("O3")))
#endif
#define HEADSTART_INLINE inline __attribute__((always_inline))

typedef float Floats __attribute__((vector_size(kLanes * sizeof(float))));
typedef int32_t Ints __attribute__((vector_size(kLanes * sizeof(float))));
typedef float Unaligned __attribute__((vector_size(kLanes * sizeof(float)), aligned(4), may_alias));

constexpr int64_t kSplit = 512;      // slots of a split
constexpr int64_t kRows = 8;         // query rows that are computed together
constexpr float kNothing = -1e30f;   // the score of what is not seen; its weight is 0
constexpr int64_t kWorkPerThread = 1 << 15;  // products, below which a thread costs more than it brings

HEADSTART_INLINE Floats load(const float* from) { return *reinterpret_cast<const Unaligned*>(from); }
HEADSTART_INLINE void store(float* to, Floats value) { *reinterpret_cast<Unaligned*>(to) = value; }
HEADSTART_INLINE Floats all(float value) { return value - Floats{}; }

HEADSTART_INLINE Floats multiply_add(Floats a, Floats b, Floats sum) {
#if defined(__AVX512F__)
  return (Floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)sum);
#elif defined(__FMA__)
  return (Floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)sum);
#else
  return a * b + sum;
#endif
}

// exp(x) for x <= 0, to a relative error of 2e-7: 2^n times a polynomial of the rest.
HEADSTART_INLINE Floats exponential(Floats x) {
  x = x < -87.0f ? all(-87.0f) : x;
  Ints power = __builtin_convertvector(x * 1.44269504f - 0.5f, Ints);  // towards 0: the nearest
  Floats whole = __builtin_convertvector(power, Floats);
  Floats rest = x - whole * 0.693359375f + whole * 2.12194440e-4f;
  Floats sum = all(1.0f / 5040);
  for (float factor : {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f})
    sum = multiply_add(sum, rest, all(factor));
  return sum * (Floats)((power + 127) << 23);
}

// Exchange between rows i and i + step of a square of kLanes x kLanes: one stage of a transposition.
template <int step>
HEADSTART_INLINE void exchange(Floats* square) {
  Ints first, second;
  for (int k = 0; k < kLanes; ++k) {
    first[k] = (k & step) == 0 ? k : k - step + kLanes;
    second[k] = (k & step) == 0 ? k + step : k + kLanes;
  }
  for (int i = 0; i < kLanes; ++i) {
    if (i & step) continue;
    Floats a = square[i], b = square[i + step];
#if defined(__AVX512F__)
    square[i] = (Floats)_mm512_permutex2var_ps((__m512)a, (__m512i)first, (__m512)b);
    square[i + step] = (Floats)_mm512_permutex2var_ps((__m512)a, (__m512i)second, (__m512)b);
#else
    for (int k = 0; k < kLanes; ++k) {
      square[i][k] = first[k] < kLanes ? a[first[k]] : b[first[k] - kLanes];
      square[i + step][k] = second[k] < kLanes ? a[second[k]] : b[second[k] - kLanes];
    }
#endif
  }
}

HEADSTART_INLINE void transpose(Floats* square) {
  exchange<1>(square);
  exchange<2>(square);
  exchange<4>(square);
#if defined(__AVX512F__)
  exchange<8>(square);
#endif
}

// Scores of kLanes keys from `keys` on (`count` of them exist) with `rows` queries: a vector each.
template <int64_t kSize>
HEADSTART_INLINE void products(const float* keys, int64_t step, int64_t count, const float* queries,
                     int64_t rows, int64_t size, Floats* scores) {
  const int64_t known = kSize ? kSize : size, whole = known / kLanes * kLanes;
  for (int64_t m = 0; m < rows; ++m) scores[m] = Floats{};
  for (int64_t d = 0; d < whole; d += kLanes) {
    Floats square[kLanes];
    for (int k = 0; k < kLanes; ++k)
      square[k] = k < count ? load(keys + k * step + d) : Floats{};
    transpose(square);
    for (int64_t m = 0; m < rows; ++m) {
      const float* query = queries + m * known + d;
      Floats even = scores[m], odd{};
      for (int k = 0; k < kLanes; k += 2) {
        even = multiply_add(all(query[k]), square[k], even);
        odd = multiply_add(all(query[k + 1]), square[k + 1], odd);
      }
      scores[m] = even + odd;
    }
  }
  for (int64_t d = whole; d < known; ++d) {
    Floats column{};
    for (int64_t k = 0; k < std::min<int64_t>(count, kLanes); ++k) column[k] = keys[k * step + d];
    for (int64_t m = 0; m < rows; ++m)
      scores[m] = multiply_add(all(queries[m * known + d]), column, scores[m]);
  }
}

// sum += weights [count] times values [count, E], of one query row.
template <int64_t kSize>
HEADSTART_INLINE void weighted(const float* values, int64_t step, int64_t count, const float* weights,
                     int64_t size, float* sum) {
  const int64_t known = kSize ? kSize : size;
  int64_t e = 0;
  for (; e + 4 * kLanes <= known; e += 4 * kLanes) {
    Floats a = load(sum + e), b = load(sum + e + kLanes);
    Floats c = load(sum + e + 2 * kLanes), d = load(sum + e + 3 * kLanes);
    for (int64_t s = 0; s < count; ++s) {
      const float* value = values + s * step + e;
      Floats weight = all(weights[s]);
      a = multiply_add(weight, load(value), a);
      b = multiply_add(weight, load(value + kLanes), b);
      c = multiply_add(weight, load(value + 2 * kLanes), c);
      d = multiply_add(weight, load(value + 3 * kLanes), d);
    }
    store(sum + e, a), store(sum + e + kLanes, b);
    store(sum + e + 2 * kLanes, c), store(sum + e + 3 * kLanes, d);
  }
  for (; e + kLanes <= known; e += kLanes) {
    Floats a = load(sum + e);
    for (int64_t s = 0; s < count; ++s) a = multiply_add(all(weights[s]), load(values + s * step + e), a);
    store(sum + e, a);
  }
  for (; e < known; ++e)
    for (int64_t s = 0; s < count; ++s) sum[e] += weights[s] * values[s * step + e];
}

struct Matrix {  // four dimensions of a tensor of floats
  float* data;
  int64_t size[4], step[4];
  float* at(int64_t i, int64_t j, int64_t k) const {
    return data + i * step[0] + j * step[1] + k * step[2];
  }
};

// words [1|B, Q, W], depth [1|B, N], at [1|B, Q]: steps of 0 along B where all rows have one tree.
struct Tree {
  const int32_t* words;
  const int64_t *depth, *at;
  int64_t nodes, words_row, words_query, depth_row, at_row;
};

struct Call {
  Matrix query, keys, values, out;  // [B, h*G, Q, D], [B, h, S, D], [B, h, S, E], [B, Q, h*G, E]
  const int64_t* lengths;           // [B]
  Tree tree;
  const float* sinks;  // [h*G], or null
  float scaling, softcap;  // softcap 0: none
  int64_t window;          // 0: none

  int64_t rows() const { return query.size[0]; }
  int64_t asked() const { return query.size[2]; }
  int64_t heads() const { return keys.size[1]; }
  int64_t groups() const { return query.size[1] / heads(); }
  int64_t queries() const { return groups() * asked(); }
  // The first slot that any query sees; the root would look back furthest.
  int64_t begin(int64_t row) const {
    return window == 0 ? 0 : std::max<int64_t>(0, lengths[row] + 1 - window);
  }
  int64_t end(int64_t row) const { return std::min(lengths[row] + tree.nodes, keys.size[2]); }

  // Whether query `which` of `row` sees what slot `slot` holds.
  bool sees(int64_t row, int64_t which, int64_t slot) const {
    const int64_t* depth = tree.depth + row * tree.depth_row;
    int64_t child = slot - lengths[row], position = slot;
    if (child >= 0) {
      int32_t word = tree.words[row * tree.words_row + which * tree.words_query + child / 32];
      if (!((static_cast<uint32_t>(word) >> (child % 32)) & 1)) return false;
      position = lengths[row] + depth[child];
    }
    return window == 0 || position > lengths[row] + tree.at[row * tree.at_row + which] - window;
  }
};

// What a split gives for one query row: E weighted sums of values, the peak of the scores, the sum of
// the weights.
inline int64_t partial_size(const Call& call) { return call.values.size[3] + 2; }

template <int64_t kSize, int64_t kValue>
HEADSTART_FAST void read_split(const Call& call, int64_t row, int64_t head, int64_t split, float* partials,
                       std::vector<float>& space) {
  const int64_t size = kSize ? kSize : call.query.size[3];
  const int64_t value_size = kValue ? kValue : call.values.size[3];
  const int64_t stop = std::min((split + 1) * kSplit, call.end(row));
  const int64_t start = std::min(std::max(split * kSplit, call.begin(row)), stop);
  const int64_t count = stop - start, width = (count + kLanes - 1) / kLanes * kLanes;
  const int64_t total = call.queries(), asked = call.asked(), committed = call.lengths[row];
  space.resize(kRows * (size + kSplit));
  float *queries = space.data(), *scores = queries + kRows * size;
  const float* keys = call.keys.at(row, head, start);
  const float* values = call.values.at(row, head, start);
  for (int64_t first = 0; first < total; first += kRows) {
    const int64_t rows = std::min(kRows, total - first);
    for (int64_t m = 0; m < rows; ++m) {
      const int64_t group = (first + m) / asked, which = (first + m) % asked;
      const float* query = call.query.at(row, head * call.groups() + group, which);
      for (int64_t d = 0; d < size; ++d) queries[m * size + d] = query[d] * call.scaling;
    }
    for (int64_t s = 0; s < count; s += kLanes) {
      Floats found[kRows];
      products<kSize>(keys + s * call.keys.step[2], call.keys.step[2], count - s, queries, rows, size,
                      found);
      for (int64_t m = 0; m < rows; ++m) store(scores + m * kSplit + s, found[m]);
    }
    for (int64_t m = 0; m < rows; ++m) {
      const int64_t which = (first + m) % asked;
      float* own = scores + m * kSplit;
      if (call.softcap != 0)
        for (int64_t s = 0; s < count; ++s) own[s] = call.softcap * std::tanh(own[s] / call.softcap);
      for (int64_t s = call.window ? 0 : std::max<int64_t>(committed - start, 0); s < count; ++s)
        if (!call.sees(row, which, start + s)) own[s] = kNothing;
      for (int64_t s = count; s < width; ++s) own[s] = kNothing;
      float peak = kNothing;
      for (int64_t s = 0; s < count; ++s) peak = std::max(peak, own[s]);
      float* partial = partials + (first + m) * (value_size + 2);
      std::memset(partial, 0, value_size * sizeof(float));
      float sum = 0;
      if (peak > kNothing) {
        Floats sums{};
        for (int64_t s = 0; s < width; s += kLanes) {
          Floats score = load(own + s), weight = exponential(score - peak);
          weight = score > all(kNothing) ? weight : Floats{};
          sums += weight;
          store(own + s, weight);
        }
        for (int k = 0; k < kLanes; ++k) sum += sums[k];
        weighted<kValue>(values, call.values.step[2], count, own, value_size, partial);
      }
      partial[value_size] = peak, partial[value_size + 1] = sum;
    }
  }
}

// Add up the splits of one key/value head's query rows.
HEADSTART_FAST inline void combine(const Call& call, int64_t row, int64_t head, int64_t splits,
                    const float* partials) {
  const int64_t size = call.values.size[3], step = call.queries() * (size + 2);
  for (int64_t m = 0; m < call.queries(); ++m) {
    const int64_t query_head = head * call.groups() + m / call.asked();
    const float* own = partials + m * (size + 2);
    float peak = call.sinks ? call.sinks[query_head] : kNothing;
    for (int64_t i = 0; i < splits; ++i) peak = std::max(peak, own[i * step + size]);
    float total = call.sinks ? std::exp(call.sinks[query_head] - peak) : 0;
    float* out = call.out.at(row, m % call.asked(), query_head);
    std::memset(out, 0, size * sizeof(float));
    for (int64_t i = 0; i < splits; ++i) {
      const float* part = own + i * step;
      if (part[size + 1] == 0) continue;
      const float weight = std::exp(part[size] - peak);
      total += weight * part[size + 1];
      for (int64_t e = 0; e < size; ++e) out[e] += weight * part[e];
    }
    const float scale = total > 0 ? 1 / total : 0;
    for (int64_t e = 0; e < size; ++e) out[e] *= scale;
  }
}

template <int64_t kSize, int64_t kValue>
inline void run(const Call& call) {
  struct Task {
    int64_t row, head, split;
  };
  static thread_local std::vector<Task> tasks;
  static thread_local std::vector<float> results;
  tasks.clear();
  int64_t slots = 0;
  bool divided = false;
  for (int64_t row = 0; row < call.rows(); ++row)
    for (int64_t head = 0; head < call.heads(); ++head)
      for (int64_t split = 0; split * kSplit < call.end(row); ++split) {
        tasks.push_back({row, head, split});
        slots += std::min(kSplit, call.end(row) - split * kSplit);
        divided |= split > 0;
      }
  const int64_t partial = call.queries() * partial_size(call);
  const int64_t count = static_cast<int64_t>(tasks.size());
  results.resize(count * partial);
  // what a thread sees of another's thread_local is a pointer
  const Task* all_tasks = tasks.data();
  float* partials = results.data();
  const bool many = slots * call.queries() * (call.query.size[3] + call.values.size[3]) > kWorkPerThread;
#pragma omp parallel if (many && count > 1)
  {
    static thread_local std::vector<float> space;
#pragma omp for schedule(static)
    for (int64_t i = 0; i < count; ++i) {
      const Task& task = all_tasks[i];
      read_split<kSize, kValue>(call, task.row, task.head, task.split, partials + i * partial, space);
      // one split: nothing to wait for
      if (task.split == 0 && call.end(task.row) <= kSplit)
        combine(call, task.row, task.head, 1, partials + i * partial);
    }
#pragma omp for schedule(static)
    for (int64_t i = 0; i < (divided ? count : 0); ++i) {
      const Task& task = all_tasks[i];
      const int64_t splits = (call.end(task.row) + kSplit - 1) / kSplit;
      if (task.split == 0 && splits > 1)
        combine(call, task.row, task.head, splits, partials + i * partial);
    }
  }
}

inline Matrix matrix(AtenTensorHandle tensor) {
  void* data;
  int64_t *size, *step;
  aoti_torch_get_data_ptr(tensor, &data);
  aoti_torch_get_sizes(tensor, &size);
  aoti_torch_get_strides(tensor, &step);
  Matrix found{static_cast<float*>(data), {}, {}};
  std::copy(size, size + 4, found.size), std::copy(step, step + 4, found.step);
  return found;
}

template <typename T>
inline T* data_of(AtenTensorHandle tensor) {
  void* data;
  aoti_torch_get_data_ptr(tensor, &data);
  return static_cast<T*>(data);
}

// The step along the first dimension; 0 where it has one entry, which all rows share.
inline int64_t row_step(AtenTensorHandle tensor) {
  int64_t *size, *step;
  aoti_torch_get_sizes(tensor, &size);
  aoti_torch_get_strides(tensor, &step);
  return size[0] == 1 ? 0 : step[0];
}

inline AtenTensorHandle tree_attention(AtenTensorHandle query, AtenTensorHandle keys,
                                       AtenTensorHandle values, AtenTensorHandle lengths,
                                       AtenTensorHandle words, AtenTensorHandle depth,
                                       AtenTensorHandle at, double scaling, int64_t window,
                                       double softcap, AtenTensorHandle* sinks) {
  Call call{matrix(query), matrix(keys), matrix(values), {}, data_of<int64_t>(lengths), {},
            sinks ? data_of<float>(*sinks) : nullptr, static_cast<float>(scaling),
            static_cast<float>(softcap), window};
  int64_t *word_step, *depth_size;
  aoti_torch_get_strides(words, &word_step);
  aoti_torch_get_sizes(depth, &depth_size);
  call.tree = {data_of<int32_t>(words), data_of<int64_t>(depth), data_of<int64_t>(at),
               depth_size[1], row_step(words), word_step[1], row_step(depth), row_step(at)};
  const int64_t size[4] = {call.rows(), call.asked(), call.query.size[1], call.values.size[3]};
  const int64_t step[4] = {size[1] * size[2] * size[3], size[2] * size[3], size[3], 1};
  AtenTensorHandle out;
  aoti_torch_empty_strided(4, size, step, aoti_torch_dtype_float32(), aoti_torch_device_type_cpu(), 0,
                           &out);
  call.out = matrix(out);
  if (call.query.size[3] == 64 && call.values.size[3] == 64)
    run<64, 64>(call);
  else if (call.query.size[3] == 128 && call.values.size[3] == 128)
    run<128, 128>(call);
  else
    run<0, 0>(call);
  return out;
}

}  // namespace headstart
