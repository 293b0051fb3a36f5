// Attention of several query tokens a row over the paged cache, in bfloat16 with avx512_bf16; see prefill.py for shapes.
//
// One piece of work is one row, one KV head and up to CHUNK of its queries. Its keys are brought into panels first, 16 keys
// side by side and pairs of features one after another, as vdpbf16ps takes them:
//
//     panel of keys 16j .. 16j+15:   d = 0,1: k0d0 k0d1 k1d0 k1d1 … k15d1 | d = 2,3: …          one register a step
//
// Then come tiles of ROWS query heads (queries outside, the G heads that share the KV head inside): scores of 4 panels at a
// time in 6 x 4 registers, softmax over the visible keys, and values read in place, 6 rows x 64 features in registers.
//
// Everything that a query meets is in the order of absolute positions, and what it may not see adds exact zeros: its result
// depends neither on how its prompt was cut into steps nor on the other rows, nor on the number of threads.
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#if defined(__AVX512BF16__) && defined(__AVX512BW__)
#include <immintrin.h>
#endif

namespace {

struct Prefill {
  const uint16_t* query;
  int64_t q_token;
  const uint16_t* cache;
  int64_t s_block, s_kv, s_token, s_head;
  const int32_t* table;
  int64_t t_row;
  const int32_t *starts, *seq_lens;
  uint16_t* out;
  int64_t o_token;
  float* lse;
  int64_t rows, heads, kv_heads, d, block, window;
  double scale, soft_cap;
  int64_t threads;
};

#if defined(__AVX512BF16__) && defined(__AVX512BW__)

using bf16 = uint16_t;
constexpr int ROWS = 6, PANELS = 4, LANES = 16, CHUNK = 64;

struct Work {
  int64_t row, head, first, count;  // queries [first, first + count) of the row
};

struct Scratch {
  std::vector<bf16> queries, keys;
  std::vector<float> scores;
  std::vector<const bf16*> values;
};

inline __m512 widen(const bf16* x) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)x)), 16));
}

// exp for x <= 0, zero below -87 (denormal numbers are slow, and masked scores are many); NaN stays NaN: 2^n times a
// polynomial on [-ln2/2, ln2/2] (Cody and Waite's reduction).
inline __m512 exp_vec(__m512 x) {
  const __mmask16 seen = _mm512_cmp_ps_mask(x, _mm512_set1_ps(-87.0f), _CMP_NLT_UQ);
  x = _mm512_maskz_mov_ps(seen, x);
  const __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), 8);
  __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);
  r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), r);
  __m512 p = _mm512_set1_ps(1.9875691500e-4f);
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.3981999507e-3f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(8.3334519073e-3f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(4.1665795894e-2f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.6666665459e-1f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(5.0000001201e-1f));
  p = _mm512_add_ps(_mm512_fmadd_ps(_mm512_mul_ps(p, r), r, r), _mm512_set1_ps(1.0f));
  return _mm512_maskz_scalef_ps(seen, p, n);
}

// cap * tanh(x / cap), by exp of minus the magnitude
inline __m512 capped(__m512 x, float cap) {
  const __m512 one = _mm512_set1_ps(1.0f), t = _mm512_div_ps(x, _mm512_set1_ps(cap));
  const __m512 e = exp_vec(_mm512_mul_ps(_mm512_abs_ps(t), _mm512_set1_ps(-2.0f)));
  const __m512 magnitude = _mm512_div_ps(_mm512_sub_ps(one, e), _mm512_add_ps(one, e));
  const __m512i sign = _mm512_and_si512(_mm512_castps_si512(t), _mm512_set1_epi32(int(0x80000000u)));
  return _mm512_mul_ps(_mm512_castsi512_ps(_mm512_or_si512(_mm512_castps_si512(magnitude), sign)),
                       _mm512_set1_ps(cap));
}

// Keys [low, high) of the row into panels from `low` (a multiple of 16) on, zeros behind them; and where values stand.
void gather(const Prefill& a, const Work& w, int64_t low, int64_t high, int64_t padded, Scratch& s) {
  const int64_t pairs = a.d / 2;
  s.keys.resize(padded * a.d);
  s.values.resize(high - low);
  const int32_t* table = a.table + w.row * a.t_row;
  const bf16* base = a.cache + w.head * a.s_head;
  uint32_t* to = reinterpret_cast<uint32_t*>(s.keys.data());
  for (int64_t j = 0; j < padded; ++j) {
    uint32_t* lane = to + j / LANES * pairs * LANES + j % LANES;
    if (low + j >= high) {
      for (int64_t i = 0; i < pairs; ++i) lane[i * LANES] = 0;
      continue;
    }
    const int64_t pos = low + j;
    const bf16* key = base + table[pos / a.block] * a.s_block + (pos % a.block) * a.s_token;
    s.values[j] = key + a.s_kv;
    for (int64_t i = 0; i < pairs; ++i) std::memcpy(lane + i * LANES, key + 2 * i, 4);
  }
}

// scores[r][0 .. keys) of ROWS queries; keys is a multiple of PANELS * LANES.
void score(const bf16* query, const bf16* keys, int64_t d, int64_t count, float* scores, int64_t stride) {
  const int64_t panel = d * LANES;
  for (int64_t j = 0; j < count; j += PANELS * LANES, keys += PANELS * panel) {
    __m512 sum[ROWS][PANELS];
    for (int r = 0; r < ROWS; ++r)
      for (int c = 0; c < PANELS; ++c) sum[r][c] = _mm512_setzero_ps();
    for (int64_t i = 0; i < d; i += 2) {
      __m512bh k[PANELS];
#pragma GCC unroll 4
      for (int c = 0; c < PANELS; ++c) k[c] = (__m512bh)_mm512_loadu_si512(keys + c * panel + i * LANES);
#pragma GCC unroll 6
      for (int r = 0; r < ROWS; ++r) {
        int32_t pair;
        std::memcpy(&pair, query + r * d + i, 4);
        const __m512bh q = (__m512bh)_mm512_set1_epi32(pair);
#pragma GCC unroll 4
        for (int c = 0; c < PANELS; ++c) sum[r][c] = _mm512_dpbf16_ps(sum[r][c], q, k[c]);
      }
    }
    for (int r = 0; r < ROWS; ++r)
      for (int c = 0; c < PANELS; ++c) _mm512_storeu_ps(scores + r * stride + j + c * LANES, sum[r][c]);
  }
}

// Scores to weights in place over [0, count): zero outside [first, last). Returns the sum, and the maximum in *highest.
float soften(float* s, int64_t count, int64_t first, int64_t last, float scale, float cap, float* highest) {
  const __m512 low = _mm512_set1_ps(-INFINITY);
  __m512 most = low;
  for (int64_t j = 0; j < count; j += LANES) {
    const __m512i index = _mm512_add_epi32(_mm512_set1_epi32(int(j)), _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10,
                                                                                       11, 12, 13, 14, 15));
    const __mmask16 seen = _mm512_cmpge_epi32_mask(index, _mm512_set1_epi32(int(first))) &
                           _mm512_cmplt_epi32_mask(index, _mm512_set1_epi32(int(last)));
    __m512 x = _mm512_mul_ps(_mm512_loadu_ps(s + j), _mm512_set1_ps(scale));
    if (cap > 0.0f) x = capped(x, cap);
    x = _mm512_mask_mov_ps(low, seen, x);
    most = _mm512_max_ps(most, x);
    _mm512_storeu_ps(s + j, x);
  }
  *highest = _mm512_reduce_max_ps(most);
  const __m512 top = _mm512_set1_ps(*highest);
  __m512 sum = _mm512_setzero_ps();
  for (int64_t j = 0; j < count; j += LANES) {
    const __m512 e = exp_vec(_mm512_sub_ps(_mm512_loadu_ps(s + j), top));
    sum = _mm512_add_ps(sum, e);
    _mm512_storeu_ps(s + j, e);
  }
  return _mm512_reduce_add_ps(sum);
}

// Features [at, at + 64) of the weighted values of ROWS rows, over keys [0, count).
void mix(const float* weights, int64_t stride, const bf16* const* values, int64_t at, int64_t count,
         __m512 (*total)[4]) {
  __m512 sum[ROWS][4];
  for (int r = 0; r < ROWS; ++r)
    for (int c = 0; c < 4; ++c) sum[r][c] = _mm512_setzero_ps();
  for (int64_t j = 0; j < count; ++j) {
    __m512 v[4];
#pragma GCC unroll 4
    for (int c = 0; c < 4; ++c) v[c] = widen(values[j] + at + c * LANES);
#pragma GCC unroll 6
    for (int r = 0; r < ROWS; ++r) {
      const __m512 p = _mm512_set1_ps(weights[r * stride + j]);
#pragma GCC unroll 4
      for (int c = 0; c < 4; ++c) sum[r][c] = _mm512_fmadd_ps(p, v[c], sum[r][c]);
    }
  }
  std::memcpy(total, sum, sizeof sum);
}

void attend(const Prefill& a, const Work& w, Scratch& s) {
  const int64_t group = a.heads / a.kv_heads, d = a.d, lines = w.count * group;
  const int64_t token0 = a.starts[w.row] + w.first;
  const int64_t position0 = a.seq_lens[w.row] - (a.starts[w.row + 1] - a.starts[w.row]) + w.first;
  // the first key that a query at `position` sees
  auto first_key = [&](int64_t position) { return a.window && position >= a.window ? position - a.window + 1 : 0; };
  const int64_t step = PANELS * LANES, low = first_key(position0) / step * step, high = position0 + w.count;
  const int64_t padded = (high - low + step - 1) / step * step;
  gather(a, w, low, high, padded, s);
  s.queries.assign((lines + ROWS) * d, 0);
  for (int64_t i = 0; i < lines; ++i)
    std::memcpy(&s.queries[i * d], a.query + (token0 + i / group) * a.q_token + (w.head * group + i % group) * d, d * 2);
  s.scores.resize(ROWS * padded);
  for (int64_t line = 0; line < lines; line += ROWS) {
    const int64_t used = lines - line < ROWS ? lines - line : ROWS;
    // the tile's keys, relative to `low`: from its first query's first to its last query's own
    const int64_t from = (first_key(position0 + line / group) - low) / step * step;
    const int64_t to = position0 + (line + used - 1) / group + 1 - low, count = to - from;
    score(&s.queries[line * d], &s.keys[from * d], d, (count + step - 1) / step * step, s.scores.data(), padded);
    float inverse[ROWS];
    for (int r = 0; r < ROWS; ++r) {
      float* row = &s.scores[r * padded];
      const int64_t i = line + (r < used ? r : used - 1), position = position0 + i / group;
      float highest;
      const float sum = soften(row, count, first_key(position) - low - from, position + 1 - low - from, float(a.scale),
                               float(a.soft_cap), &highest);
      inverse[r] = 1.0f / sum;
      if (a.lse && r < used)
        a.lse[(token0 + i / group) * a.heads + w.head * group + i % group] = highest + std::log(sum);
    }
    for (int64_t at = 0; at < d; at += 4 * LANES) {
      __m512 total[ROWS][4];
      mix(s.scores.data(), padded, &s.values[from], at, count, total);
      for (int r = 0; r < used; ++r) {
        const int64_t i = line + r;
        bf16* out = a.out + (token0 + i / group) * a.o_token + (w.head * group + i % group) * d + at;
        for (int c = 0; c < 4; ++c)
          _mm256_storeu_si256((__m256i*)(out + c * LANES),
                              (__m256i)_mm512_cvtneps_pbh(_mm512_mul_ps(total[r][c], _mm512_set1_ps(inverse[r]))));
      }
    }
  }
}
#endif

}  // namespace

extern "C" void eb_prefill_attention(const Prefill* args) {
#if defined(__AVX512BF16__) && defined(__AVX512BW__)
  const Prefill& a = *args;
  std::vector<Work> works;
  for (int64_t row = 0; row < a.rows; ++row)
    for (int64_t n = a.starts[row + 1] - a.starts[row], first = 0; first < n; first += CHUNK)
      for (int64_t head = 0; head < a.kv_heads; ++head)
        works.push_back({row, head, first, n - first < CHUNK ? n - first : CHUNK});
#pragma omp parallel num_threads(int(a.threads)) if (a.threads > 1 && works.size() > 1)
  {
    Scratch scratch;
    // the longest of a prompt, its last queries, first
#pragma omp for schedule(dynamic, 1)
    for (int64_t i = int64_t(works.size()) - 1; i >= 0; --i) attend(a, works[i], scratch);
  }
#endif
}
