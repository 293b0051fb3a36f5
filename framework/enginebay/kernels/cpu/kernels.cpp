// Fused CPU kernels behind a plain C interface; see ops.py for shapes. float and bfloat16 (stored as 16 raw bits), sums in
// float32. Strides count elements. Every loop over rows runs on the OpenMP team that torch already has.
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>
#ifdef __AVX512BF16__
#include <immintrin.h>
#endif

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

// Sixteen floats; the compiler lowers them to what the processor has.
typedef float Vec __attribute__((vector_size(64)));
typedef uint32_t Bits __attribute__((vector_size(64)));
typedef uint16_t Half __attribute__((vector_size(32)));
typedef int32_t Mask __attribute__((vector_size(64)));
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
inline void store_vec(float* p, Vec v) { std::memcpy(p, &v, sizeof v); }
inline void store_vec(bf16* p, Vec v) {  // as store
  const Bits bits = (Bits)v, rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  const Half h = __builtin_convertvector(v == v ? rounded : rounded * 0 + 0x7fc0, Half);
  std::memcpy(p, &h, sizeof h);
}
inline Vec splat(float x) { return x - Vec{}; }
inline float sum_lanes(Vec v) {
  v += __builtin_shuffle(v, Lanes{8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7});
  v += __builtin_shuffle(v, Lanes{4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11});
  v += __builtin_shuffle(v, Lanes{2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13});
  return v[0] + v[1];
}

// Lane i of the result is the sum of v[i]'s lanes: each round adds halves and so packs twice as many sums into a vector.
//
//     v[0] a a a a   v[1] b b b b   ->   a a b b   ->   a b c d
//     v[2] c c c c   v[3] d d d d        c c d d
inline Vec sums(Vec* v) {
  for (int i = 0; i < 8; ++i)
    v[i] = __builtin_shuffle(v[2 * i], v[2 * i + 1], Lanes{0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23}) +
           __builtin_shuffle(v[2 * i], v[2 * i + 1], Lanes{8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31});
  for (int i = 0; i < 4; ++i)
    v[i] = __builtin_shuffle(v[2 * i], v[2 * i + 1], Lanes{0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27}) +
           __builtin_shuffle(v[2 * i], v[2 * i + 1], Lanes{4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31});
  for (int i = 0; i < 2; ++i)
    v[i] = __builtin_shuffle(v[2 * i], v[2 * i + 1], Lanes{0, 1, 4, 5, 8, 9, 12, 13, 16, 17, 20, 21, 24, 25, 28, 29}) +
           __builtin_shuffle(v[2 * i], v[2 * i + 1], Lanes{2, 3, 6, 7, 10, 11, 14, 15, 18, 19, 22, 23, 26, 27, 30, 31});
  return __builtin_shuffle(v[0], v[1], Lanes{0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30}) +
         __builtin_shuffle(v[0], v[1], Lanes{1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31});
}

// fast_exp of sixteen.
inline Vec exp_vec(Vec x) {
  x = x < -87.0f ? splat(-87.0f) : x;
  const Lanes whole = __builtin_convertvector(x * 1.44269504f + (x < 0.0f ? splat(-0.5f) : splat(0.5f)), Lanes);
  const Vec n = __builtin_convertvector(whole, Vec);
  Vec r = x - n * 0.693359375f;
  r = r + n * 2.12194440e-4f;
  Vec p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  return p * (Vec)((Bits)(whole + 127) << 23);
}

template <typename T>
void rms_norm(const T* x, T* residual, const T* weight, T* out, int64_t rows, int64_t d, float eps, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1)
  for (int64_t row = 0; row < rows; ++row) {
    const T* in = x + row * d;
    T *sum = residual ? residual + row * d : nullptr, *to = out + row * d;
    Vec squares = {};
    float rest = 0.0f;
    int64_t i = 0;
    for (; i + kLanes <= d; i += kLanes) {
      Vec value = load_vec(in + i);
      if (sum) {
        store_vec(sum + i, value + load_vec(sum + i));
        value = load_vec(sum + i);
      }
      squares += value * value;
    }
    for (; i < d; ++i) {
      if (sum) store(sum + i, load(sum[i]) + load(in[i]));
      const float value = load(sum ? sum[i] : in[i]);
      rest += value * value;
    }
    const float inverse = 1.0f / std::sqrt((sum_lanes(squares) + rest) / float(d) + eps);
    if (sum) in = sum;
    for (i = 0; i + kLanes <= d; i += kLanes) store_vec(to + i, load_vec(in + i) * inverse * load_vec(weight + i));
    for (; i < d; ++i) store(to + i, load(in[i]) * inverse * load(weight[i]));
  }
}

template <typename T>
void silu_mul(const T* gate_up, T* out, int64_t rows, int64_t f, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1)
  for (int64_t row = 0; row < rows; ++row) {
    const T *gate = gate_up + row * 2 * f, *up = gate + f;
    T* to = out + row * f;
    int64_t i = 0;
    for (; i + kLanes <= f; i += kLanes) {
      const Vec g = load_vec(gate + i);
      store_vec(to + i, g / (1.0f + exp_vec(-g > 87.0f ? splat(87.0f) : -g)) * load_vec(up + i));
    }
    for (; i < f; ++i) {
      const float g = load(gate[i]);
      store(to + i, g / (1.0f + fast_exp(-g > 87.0f ? 87.0f : -g)) * load(up[i]));
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
        int64_t i = 0;
        for (; i + kLanes <= half; i += kLanes) {
          const Vec x = load_vec(a + i), y = load_vec(b + i);
          store_vec(a + i, x * load_vec(cos + i) + y * load_vec(sin + i));
          store_vec(b + i, y * load_vec(cos + i + half) + x * load_vec(sin + i + half));
        }
        for (; i < half; ++i) {
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

// A row's cached tokens in order, from `first` on: where each one's head begins. Counting spares two divisions a token.
template <typename T>
struct Walk {
  const T* base;
  const int32_t* table;
  const Decode& a;
  int64_t column, offset;
  Walk(const T* base, const int32_t* table, const Decode& a, int64_t first)
      : base(base), table(table), a(a), column(first / a.block), offset(first % a.block) {}
  const T* next() {
    const T* at = base + table[column] * a.s_block + offset * a.s_token;
    if (++offset == a.block) {
      offset = 0;
      ++column;
    }
    return at;
  }
};

// Tokens lie a few hundred bytes apart, which the processor's own prefetchers do not follow: ask for what is read this many
// tokens later.
constexpr int64_t kAhead = 24;
template <typename T, int N>
inline void prefetch(const T* head) {
  for (int64_t byte = 0; byte < N * kLanes * int64_t(sizeof(T)); byte += 64)
    __builtin_prefetch(reinterpret_cast<const char*>(head) + byte);
}

// A head of N vectors, and its product with a key. bfloat16 pairs are multiplied as they stand where the processor can.
template <typename T, int N>
struct Head {
  Vec parts[N];
  explicit Head(const T* p) {
    for (int n = 0; n < N; ++n) parts[n] = load_vec(p + n * kLanes);
  }
  Vec times(const Head& other) const {
    Vec dot = parts[0] * other.parts[0];
    for (int n = 1; n < N; ++n) dot += parts[n] * other.parts[n];
    return dot;
  }
};
#ifdef __AVX512BF16__
template <int N>
struct Head<bf16, N> {
  __m512bh parts[N / 2];
  explicit Head(const bf16* p) {
    for (int n = 0; n < N / 2; ++n) parts[n] = (__m512bh)_mm512_loadu_si512(p + n * 2 * kLanes);
  }
  Vec times(const Head& other) const {
    __m512 dot = _mm512_setzero_ps();
    for (int n = 0; n < N / 2; ++n) dot = _mm512_dpbf16_ps(dot, parts[n], other.parts[n]);
    return (Vec)dot;
  }
};
#endif

// scores[g][j] = query[g] . key[j] * scale, sixteen keys at a time. N vectors make a head and G heads share a key, both known
// at compile time, so that the queries stay in registers.
template <typename T, int N, int G>
void score(const T* query, const T* base, const int32_t* table, const Decode& a, int64_t first, int64_t keys,
           float* scores) {
  std::vector<Head<T, N>> q;
  for (int g = 0; g < G; ++g) q.emplace_back(query + g * N * kLanes);
  Vec dots[G][kLanes] = {};
  Walk<T> walk(base, table, a, first), ahead(base, table, a, first + kAhead), values(base + a.s_kv, table, a, first);
  for (int64_t j = 0; j < keys; j += kLanes) {
    const int count = keys - j < kLanes ? int(keys - j) : kLanes;
    for (int i = 0; i < count; ++i) {
      prefetch<T, N>(j + i + kAhead < keys ? ahead.next() : values.next());
      const Head<T, N> key(walk.next());
      for (int g = 0; g < G; ++g) dots[g][i] = q[g].times(key);
    }
    for (int g = 0; g < G; ++g) {
      const Vec scaled = sums(dots[g]) * float(a.scale);
      std::memcpy(scores + g * keys + j, &scaled, count * sizeof(float));
    }
  }
}

// acc[g] = sum over j of scores[g][j] * value[j], the sums in registers.
template <typename T, int N, int G>
void mix(const float* scores, const T* base, const int32_t* table, const Decode& a, int64_t first, int64_t keys,
         float* acc) {
  Vec total[G][N] = {};
  Walk<T> walk(base, table, a, first), ahead(base, table, a, first + kAhead);
  for (int64_t j = 0; j < keys; ++j) {
    if (j + kAhead < keys) prefetch<T, N>(ahead.next());
    const T* value = walk.next();
    for (int n = 0; n < N; ++n) {
      const Vec v = load_vec(value + n * kLanes);
      for (int g = 0; g < G; ++g) total[g][n] += scores[g * keys + j] * v;
    }
  }
  std::memcpy(acc, total, sizeof total);
}

// The same for any head size and group.
template <typename T>
void score_any(const T* query, const T* base, const int32_t* table, const Decode& a, int64_t first, int64_t keys,
               float* scores) {
  Walk<T> walk(base, table, a, first);
  for (int64_t j = 0; j < keys; ++j) {
    const T* key = walk.next();
    for (int64_t g = 0; g < a.heads / a.kv_heads; ++g) {
      float dot = 0.0f;
#pragma omp simd reduction(+ : dot)
      for (int64_t i = 0; i < a.d; ++i) dot += load(query[g * a.d + i]) * load(key[i]);
      scores[g * keys + j] = dot * float(a.scale);
    }
  }
}
template <typename T>
void mix_any(const float* scores, const T* base, const int32_t* table, const Decode& a, int64_t first, int64_t keys,
             float* acc) {
  const int64_t group = a.heads / a.kv_heads;
  for (int64_t i = 0; i < group * a.d; ++i) acc[i] = 0.0f;
  Walk<T> walk(base, table, a, first);
  for (int64_t j = 0; j < keys; ++j) {
    const T* value = walk.next();
    for (int64_t g = 0; g < group; ++g)
      for (int64_t i = 0; i < a.d; ++i) acc[g * a.d + i] += scores[g * keys + j] * load(value[i]);
  }
}

template <typename T>
struct Products {
  void (*score)(const T*, const T*, const int32_t*, const Decode&, int64_t, int64_t, float*) = score_any<T>;
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
  scratch.resize(group * (keys + d));
  float *acc = scratch.data(), *scores = acc + group * d;
  const T* q = static_cast<const T*>(a.query) + row * a.q_token + head * group * d;
  const T* base = static_cast<const T*>(a.cache) + head * a.s_head;
  const int32_t* table = a.table + row * a.t_row;
  products.score(q, base, table, a, first, keys, scores);
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
#pragma omp for schedule(dynamic, a.rows >= 2 * threads ? a.kv_heads : 1)
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
