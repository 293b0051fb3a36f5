// bfloat16 matrix products over weights packed for this kernel; see packed_linear.py for shapes.
//
// The weight [N, K] is kept in panels of 32 outputs, and within a panel by pairs of inputs, so that one 512-bit load is 16
// outputs times two inputs, which is what one vdpbf16ps takes:
//
//     panel p:   k = 0,1                                   k = 2,3
//                n0k0 n0k1 n1k0 n1k1 … n31k0 n31k1 | n0k2 n0k3 …        64 values, 128 bytes, a step
//
// A product streams a panel once for up to ROWS rows, whose sums stay in registers (2 x ROWS of 32). One token therefore runs
// at memory speed, and many at arithmetic speed, over the same bytes. A row's sums are added in the order of k and of nothing
// else, so its result does not depend on the other rows, their number, or the number of threads.
#include <cstdint>
#include <cstring>

#if defined(__AVX512BF16__) && defined(__AVX512BW__)
#include <immintrin.h>
#include <omp.h>

namespace {

using bf16 = uint16_t;
constexpr int PANEL = 32, ROWS = 12;
// Values ahead of the load that a lone row asks for: far enough for memory, near enough to stay in the first-level cache.
constexpr int AHEAD = 2048;

inline __m512bh broadcast_pair(const bf16* x) {
  int32_t pair;
  std::memcpy(&pair, x, 4);
  return (__m512bh)_mm512_set1_epi32(pair);
}

inline __m512 widen(const bf16* x) {
  return (__m512)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)x)), 16);
}

// M rows of x [M, 2 * pairs] times one panel.
template <int M>
void panel_product(const bf16* x, int64_t ldx, const bf16* panel, int64_t pairs, const bf16* bias, bf16* out,
                   int64_t ldo, uint32_t mask) {
  __m512 sums[M][2];
  for (int m = 0; m < M; ++m) {
    sums[m][0] = bias ? widen(bias) : _mm512_setzero_ps();
    sums[m][1] = bias ? widen(bias + 16) : _mm512_setzero_ps();
  }
  for (int64_t k = 0; k < pairs; ++k) {
    const bf16* at = panel + k * 2 * PANEL;
    const __m512bh w0 = (__m512bh)_mm512_loadu_si512(at), w1 = (__m512bh)_mm512_loadu_si512(at + PANEL);
    if (M <= 4) {
      _mm_prefetch((const char*)(at + AHEAD), _MM_HINT_T0);
      _mm_prefetch((const char*)(at + AHEAD + PANEL), _MM_HINT_T0);
    }
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m) {
      const __m512bh pair = broadcast_pair(x + m * ldx + 2 * k);
      sums[m][0] = _mm512_dpbf16_ps(sums[m][0], pair, w0);
      sums[m][1] = _mm512_dpbf16_ps(sums[m][1], pair, w1);
    }
  }
  for (int m = 0; m < M; ++m) {
    const __m512i both = (__m512i)_mm512_cvtne2ps_pbh(sums[m][1], sums[m][0]);
    _mm512_mask_storeu_epi16(out + m * ldo, mask, both);
  }
}

using Product = void (*)(const bf16*, int64_t, const bf16*, int64_t, const bf16*, bf16*, int64_t, uint32_t);
constexpr Product PRODUCTS[ROWS + 1] = {
    nullptr,           panel_product<1>,  panel_product<2>,  panel_product<3>, panel_product<4>,
    panel_product<5>,  panel_product<6>,  panel_product<7>,  panel_product<8>, panel_product<9>,
    panel_product<10>, panel_product<11>, panel_product<12>,
};

}  // namespace
#endif

extern "C" {

int eb_linear_supported() {
#if defined(__AVX512BF16__) && defined(__AVX512BW__)
  return 1;
#else
  return 0;
#endif
}

// x [rows, inputs] (inputs even, row stride ldx), panels [ceil(outputs / 32), inputs / 2, 32, 2], bias [outputs rounded up to
// 32] or null, out [rows, outputs] (row stride ldo).
struct LinearArgs {
  const uint16_t* x;
  int64_t ldx;
  const uint16_t *panels, *bias;
  uint16_t* out;
  int64_t ldo, rows, outputs, inputs, threads;
};

void eb_linear(const LinearArgs* args) {
#if defined(__AVX512BF16__) && defined(__AVX512BW__)
  const LinearArgs a = *args;
  const int64_t count = (a.outputs + PANEL - 1) / PANEL, pairs = a.inputs / 2;
  const int64_t blocks = (a.rows + ROWS - 1) / ROWS, block = blocks ? (a.rows + blocks - 1) / blocks : 1;
#pragma omp parallel num_threads(a.threads) if (a.threads > 1)
  {
    const int64_t team = omp_get_num_threads(), rank = omp_get_thread_num();
    for (int64_t p = count * rank / team; p < count * (rank + 1) / team; ++p) {
      const int64_t left = a.outputs - p * PANEL;
      const uint32_t mask = left >= PANEL ? 0xffffffffu : (1u << left) - 1;
      const bf16* bias = a.bias ? a.bias + p * PANEL : nullptr;
      for (int64_t m = 0; m < a.rows; m += block)
        PRODUCTS[a.rows - m < block ? a.rows - m : block](a.x + m * a.ldx, a.ldx, a.panels + p * pairs * 2 * PANEL,
                                                          pairs, bias, a.out + m * a.ldo + p * PANEL, a.ldo, mask);
    }
  }
#endif
}

}  // extern "C"
