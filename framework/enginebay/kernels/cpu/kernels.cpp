// Fused CPU kernels behind a plain C interface; see ops.py for shapes. float and bfloat16 (stored as 16 raw bits), sums in
// float32. Strides count elements. Every loop over rows runs on the OpenMP team that torch already has.
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

namespace {

using bf16 = uint16_t;

inline float load(float x) { return x; }
inline float load(bf16 x) {
  uint32_t bits = uint32_t(x) << 16;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}
inline void store(float* p, float x) { *p = x; }
inline void store(bf16* p, float x) {  // round to nearest even; NaN stays NaN
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  *p = bf16(x != x ? 0x7fc0 : rounded);
}

// exp for x <= 88, relative error about 1e-7: 2^n times a polynomial on [-ln2/2, ln2/2] (Cody and Waite's reduction).
// Written without branches so that it vectorises, which std::exp does not.
inline float fast_exp(float x) {
  x = x < -87.0f ? -87.0f : x;
  float n = std::nearbyint(x * 1.44269504f);
  float r = x - n * 0.693359375f;
  r = r + n * 2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  uint32_t bits = uint32_t(int32_t(n) + 127) << 23;
  float scale;
  std::memcpy(&scale, &bits, 4);
  return p * scale;
}

template <typename T>
void rms_norm(const T* x, T* residual, const T* weight, T* out, int64_t rows, int64_t d, float eps, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1)
  for (int64_t row = 0; row < rows; ++row) {
    const T* in = x + row * d;
    if (residual) {
      T* sum = residual + row * d;
      for (int64_t i = 0; i < d; ++i) store(sum + i, load(sum[i]) + load(in[i]));
      in = sum;
    }
    float squares = 0.0f;
#pragma omp simd reduction(+ : squares)
    for (int64_t i = 0; i < d; ++i) squares += load(in[i]) * load(in[i]);
    const float inverse = 1.0f / std::sqrt(squares / float(d) + eps);
    for (int64_t i = 0; i < d; ++i) store(out + row * d + i, load(in[i]) * inverse * load(weight[i]));
  }
}

template <typename T>
void silu_mul(const T* gate_up, T* out, int64_t rows, int64_t f, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1)
  for (int64_t row = 0; row < rows; ++row) {
    const T *gate = gate_up + row * 2 * f, *up = gate + f;
    for (int64_t i = 0; i < f; ++i) {
      const float g = load(gate[i]);
      const float e = fast_exp(-g > 87.0f ? 87.0f : -g);
      store(out + row * f + i, g / (1.0f + e) * load(up[i]));
    }
  }
}

template <typename T>
void rope_and_cache(T* states, int64_t token_stride, const int64_t* positions, const T* table, int64_t rotated,
                    const int64_t* slots, T* cache, int64_t s_block, int64_t s_kv, int64_t s_token, int64_t s_head,
                    int64_t tokens, int64_t heads, int64_t kv_heads, int64_t d, int64_t block, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1)
  for (int64_t t = 0; t < tokens; ++t) {
    T* token = states + t * token_stride;
    if (rotated) {
      const T *cos = table + positions[t] * 2 * rotated, *sin = cos + rotated;  // sines are signed: [-sin | sin]
      const int64_t half = rotated / 2;
      for (int64_t h = 0; h < heads + kv_heads; ++h) {
        T *a = token + h * d, *b = a + half;
        for (int64_t i = 0; i < half; ++i) {
          const float x = load(a[i]), y = load(b[i]);
          store(a + i, x * load(cos[i]) + y * load(sin[i]));
          store(b + i, y * load(cos[i + half]) + x * load(sin[i + half]));
        }
      }
    }
    if (slots[t] < 0) continue;
    T* to = cache + (slots[t] / block) * s_block + (slots[t] % block) * s_token;
    for (int64_t h = 0; h < kv_heads; ++h) {
      std::memcpy(to + h * s_head, token + (heads + h) * d, d * sizeof(T));
      std::memcpy(to + s_kv + h * s_head, token + (heads + kv_heads + h) * d, d * sizeof(T));
    }
  }
}

// Multiply-adds below which waking a second thread costs more than it saves; as ops.py has it.
constexpr int64_t kParallelWork = 40000;

// The first index of each row's largest value; a NaN counts as the largest, as in torch.
template <typename T>
void argmax(const T* x, int64_t ldx, int64_t* out, int64_t rows, int64_t n, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1)
  for (int64_t row = 0; row < rows; ++row) {
    const T* in = x + row * ldx;
    float highest = -INFINITY;
    int nans = 0;
#pragma omp simd reduction(max : highest) reduction(| : nans)
    for (int64_t i = 0; i < n; ++i) {
      const float value = load(in[i]);
      nans |= value != value;
      highest = value > highest ? value : highest;
    }
    int64_t i = 0;
    if (nans)
      while (load(in[i]) == load(in[i])) ++i;
    else
      while (load(in[i]) != highest) ++i;
    out[row] = i;
  }
}

struct Decode {
  int64_t is_bf16;
  const void* query;
  int64_t q_token;
  const void* cache;
  int64_t s_block, s_kv, s_token, s_head;
  const int32_t* table;
  int64_t t_row;
  const int32_t* seq_lens;
  void* out;
  int64_t o_token;
  float* lse;
  int64_t rows, heads, kv_heads, d, block, window;
  double scale, soft_cap;
  int64_t threads;
};

// Sixteen floats; the compiler lowers them to what the processor has.
typedef float Vec __attribute__((vector_size(64)));
typedef uint32_t Bits __attribute__((vector_size(64)));
typedef uint16_t Half __attribute__((vector_size(32)));
typedef int Lanes __attribute__((vector_size(64)));
constexpr int kLanes = 16;

inline Vec load_vec(const float* p) {
  Vec v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
inline Vec load_vec(const bf16* p) {
  Half h;
  std::memcpy(&h, p, sizeof h);
  return (Vec)(__builtin_convertvector(h, Bits) << 16);
}
inline float sum(Vec v) {
  v += __builtin_shuffle(v, Lanes{8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7});
  v += __builtin_shuffle(v, Lanes{4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11});
  v += __builtin_shuffle(v, Lanes{2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13});
  return v[0] + v[1];
}

// scores[g][j] = query[g] . key[j]. N vectors make a head and G heads share a key, both known at compile time, so that the
// queries stay in registers.
template <typename T, int N, int G>
void score(const float* query, const T* base, const int32_t* table, const Decode& a, int64_t first, int64_t keys,
           float* scores) {
  Vec q[G][N];
  for (int g = 0; g < G; ++g)
    for (int n = 0; n < N; ++n) q[g][n] = load_vec(query + (g * N + n) * kLanes);
  for (int64_t j = 0; j < keys; ++j) {
    const int64_t pos = first + j;
    const T* key = base + table[pos / a.block] * a.s_block + (pos % a.block) * a.s_token;
    Vec k[N];
    for (int n = 0; n < N; ++n) k[n] = load_vec(key + n * kLanes);
    for (int g = 0; g < G; ++g) {
      Vec dot = q[g][0] * k[0];
      for (int n = 1; n < N; ++n) dot += q[g][n] * k[n];
      scores[g * keys + j] = sum(dot);
    }
  }
}

// acc[g] = sum over j of scores[g][j] * value[j], the sums in registers.
template <typename T, int N, int G>
void mix(const float* scores, const T* base, const int32_t* table, const Decode& a, int64_t first, int64_t keys,
         float* acc) {
  Vec total[G][N] = {};
  for (int64_t j = 0; j < keys; ++j) {
    const int64_t pos = first + j;
    const T* value = base + table[pos / a.block] * a.s_block + (pos % a.block) * a.s_token;
    for (int n = 0; n < N; ++n) {
      const Vec v = load_vec(value + n * kLanes);
      for (int g = 0; g < G; ++g) total[g][n] += scores[g * keys + j] * v;
    }
  }
  std::memcpy(acc, total, sizeof total);
}

// The same for any head size and group.
template <typename T>
void score_any(const float* query, const T* base, const int32_t* table, const Decode& a, int64_t first, int64_t keys,
               float* scores) {
  for (int64_t j = 0; j < keys; ++j) {
    const int64_t pos = first + j;
    const T* key = base + table[pos / a.block] * a.s_block + (pos % a.block) * a.s_token;
    for (int64_t g = 0; g < a.heads / a.kv_heads; ++g) {
      float dot = 0.0f;
#pragma omp simd reduction(+ : dot)
      for (int64_t i = 0; i < a.d; ++i) dot += query[g * a.d + i] * load(key[i]);
      scores[g * keys + j] = dot;
    }
  }
}
template <typename T>
void mix_any(const float* scores, const T* base, const int32_t* table, const Decode& a, int64_t first, int64_t keys,
             float* acc) {
  const int64_t group = a.heads / a.kv_heads;
  for (int64_t i = 0; i < group * a.d; ++i) acc[i] = 0.0f;
  for (int64_t j = 0; j < keys; ++j) {
    const int64_t pos = first + j;
    const T* value = base + table[pos / a.block] * a.s_block + (pos % a.block) * a.s_token;
    for (int64_t g = 0; g < group; ++g)
      for (int64_t i = 0; i < a.d; ++i) acc[g * a.d + i] += scores[g * keys + j] * load(value[i]);
  }
}

template <typename T>
struct Products {
  void (*score)(const float*, const T*, const int32_t*, const Decode&, int64_t, int64_t, float*) = score_any<T>;
  void (*mix)(const float*, const T*, const int32_t*, const Decode&, int64_t, int64_t, float*) = mix_any<T>;
};

template <typename T, int N>
Products<T> products_of(int64_t group) {
  switch (group) {
    case 1: return {score<T, N, 1>, mix<T, N, 1>};
    case 2: return {score<T, N, 2>, mix<T, N, 2>};
    case 3: return {score<T, N, 3>, mix<T, N, 3>};
    case 4: return {score<T, N, 4>, mix<T, N, 4>};
    case 7: return {score<T, N, 7>, mix<T, N, 7>};
    case 8: return {score<T, N, 8>, mix<T, N, 8>};
    default: return {};
  }
}

template <typename T>
Products<T> products(const Decode& a) {
  const int64_t group = a.heads / a.kv_heads;
  return a.d == 64 ? products_of<T, 4>(group) : a.d == 128 ? products_of<T, 8>(group) : Products<T>{};
}

// One row and one KV head: its G query heads share each key and value that is read.
template <typename T>
void attend_head(const Decode& a, const Products<T>& products, int64_t row, int64_t head, std::vector<float>& scratch) {
  const int64_t d = a.d, group = a.heads / a.kv_heads, length = a.seq_lens[row];
  const int64_t first = a.window && length > a.window ? length - a.window : 0, keys = length - first;
  scratch.resize(group * (keys + 2 * d));
  float *query = scratch.data(), *acc = query + group * d, *scores = acc + group * d;
  const T* q = static_cast<const T*>(a.query) + row * a.q_token + head * group * d;
  for (int64_t i = 0; i < group * d; ++i) query[i] = load(q[i]) * float(a.scale);
  const T* base = static_cast<const T*>(a.cache) + head * a.s_head;
  const int32_t* table = a.table + row * a.t_row;
  products.score(query, base, table, a, first, keys, scores);
  for (int64_t g = 0; g < group; ++g) {
    float* s = scores + g * keys;
    if (const float cap = float(a.soft_cap); cap > 0.0f)
      for (int64_t j = 0; j < keys; ++j) s[j] = cap * std::tanh(s[j] / cap);
    float highest = s[0], sum = 0.0f;
#pragma omp simd reduction(max : highest)
    for (int64_t j = 0; j < keys; ++j) highest = s[j] > highest ? s[j] : highest;
#pragma omp simd reduction(+ : sum)
    for (int64_t j = 0; j < keys; ++j) {
      s[j] = fast_exp(s[j] - highest);
      sum += s[j];
    }
    const float inverse = 1.0f / sum;
    for (int64_t j = 0; j < keys; ++j) s[j] *= inverse;
    if (a.lse) a.lse[row * a.heads + head * group + g] = highest + std::log(sum);
  }
  products.mix(scores, base + a.s_kv, table, a, first, keys, acc);
  T* out = static_cast<T*>(a.out) + row * a.o_token + head * group * d;
  for (int64_t i = 0; i < group * d; ++i) store(out + i, acc[i]);
}

template <typename T>
void attend(const Decode& a, int threads) {
  const Products<T> chosen = products<T>(a);
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    std::vector<float> scratch;
#pragma omp for schedule(dynamic, 1)
    for (int64_t i = 0; i < a.rows * a.kv_heads; ++i)
      attend_head<T>(a, chosen, i / a.kv_heads, i % a.kv_heads, scratch);
  }
}

// Every function takes one argument, a packed row of 8-byte fields, so that a call is a pointer and an address: recording.py
// keeps such pairs and eb_replay runs a whole step of them.

}  // namespace

extern "C" {

struct NormArgs {
  int64_t is_bf16;
  const void* x;
  void* residual;
  const void* weight;
  void* out;
  int64_t rows, d;
  double eps;
  int64_t threads;
};

void eb_rms_norm(const NormArgs* a) {
  if (a->is_bf16)
    rms_norm((const bf16*)a->x, (bf16*)a->residual, (const bf16*)a->weight, (bf16*)a->out, a->rows, a->d, a->eps,
             a->threads);
  else
    rms_norm((const float*)a->x, (float*)a->residual, (const float*)a->weight, (float*)a->out, a->rows, a->d, a->eps,
             a->threads);
}

struct SiluArgs {
  int64_t is_bf16;
  const void* gate_up;
  void* out;
  int64_t rows, f, threads;
};

void eb_silu_mul(const SiluArgs* a) {
  if (a->is_bf16)
    silu_mul((const bf16*)a->gate_up, (bf16*)a->out, a->rows, a->f, a->threads);
  else
    silu_mul((const float*)a->gate_up, (float*)a->out, a->rows, a->f, a->threads);
}

struct ArgmaxArgs {
  int64_t is_bf16;
  const void* x;
  int64_t ldx;
  int64_t* out;
  int64_t rows, n, threads;
};

void eb_argmax(const ArgmaxArgs* a) {
  if (a->is_bf16)
    argmax((const bf16*)a->x, a->ldx, a->out, a->rows, a->n, a->threads);
  else
    argmax((const float*)a->x, a->ldx, a->out, a->rows, a->n, a->threads);
}

struct RopeArgs {
  int64_t is_bf16;
  void* states;
  int64_t token_stride;
  const int64_t* positions;
  const void* table;
  int64_t rotated;
  const int64_t* slots;
  void* cache;
  int64_t s_block, s_kv, s_token, s_head, tokens, heads, kv_heads, d, block, threads;
};

void eb_rope_and_cache(const RopeArgs* a) {
  if (a->is_bf16)
    rope_and_cache((bf16*)a->states, a->token_stride, a->positions, (const bf16*)a->table, a->rotated, a->slots,
                   (bf16*)a->cache, a->s_block, a->s_kv, a->s_token, a->s_head, a->tokens, a->heads, a->kv_heads, a->d,
                   a->block, a->threads);
  else
    rope_and_cache((float*)a->states, a->token_stride, a->positions, (const float*)a->table, a->rotated, a->slots,
                   (float*)a->cache, a->s_block, a->s_kv, a->s_token, a->s_head, a->tokens, a->heads, a->kv_heads, a->d,
                   a->block, a->threads);
}

void eb_decode_attention(const Decode* a) {
  // The keys of this step, not of the one that was recorded, say whether a second thread pays.
  int64_t keys = 0;
  for (int64_t row = 0; row < a->rows; ++row)
    keys += a->window && a->seq_lens[row] > a->window ? a->window : a->seq_lens[row];
  const int threads = keys * a->heads * a->d > kParallelWork ? a->threads : 1;
  if (a->is_bf16)
    attend<bf16>(*a, threads);
  else
    attend<float>(*a, threads);
}

// count pairs of a function and its arguments, run in order.
void eb_replay(void (*const* functions)(const void*), const void* const* arguments, int64_t count) {
  for (int64_t i = 0; i < count; ++i) functions[i](arguments[i]);
}

}  // extern "C"
