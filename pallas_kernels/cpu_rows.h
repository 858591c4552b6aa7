// y = x @ w.T on a CPU, for weights stored (out, in) and any number of rows of x.
//
// Each element of y is one chain of fused multiply-adds over the inputs in order, whatever
// the number of rows and the row's place among them. So its bits depend on its row and its
// weights alone: one bit class from 1 row to thousands. Weights are read once, as they are
// stored; nothing packs them, which is what the products of XLA pay for at every call.
//
// Few rows: outputs lie in the lanes of a vector, a square of weights is transposed in
// registers. More rows: rows of x lie in the lanes, a weight is broadcast to them; blocking
// as in Goto and van de Geijn 2008, sections 4 and 5.
//
// Where weights come from is the Source's business: floats as they are stored, or ones that
// it makes of fewer bits, block by block, into a cache-sized room. The sums are the same.
#pragma once

#include "cpu_tasks.h"

#include <vector>

namespace headrace {

// Rows up to which outputs lie in the lanes.
constexpr int FEW_ROWS = IS_WIDE ? 8 : 4;
constexpr int MAX_VECTORS = IS_WIDE ? 4 : 2;
constexpr int PANEL = MAX_VECTORS * LANES;
// Outputs of one task: a multiple of LANES and of the tiles 12 and 6.
constexpr int OUTPUTS = 48;
// How far ahead a weight's row is fetched, in weights.
constexpr int AHEAD = 96;

struct Weights {
  const float* w;  // the first of the outputs in question
  int64_t I;
};

// LANES outputs of R rows.
template <int R>
inline void outputs_in_lanes(Weights weights, const float* x, float* y, int64_t O) {
  const auto [w, I] = weights;
  Floats sums[R]{};
  int64_t i = 0;
  for (; i + LANES <= I; i += LANES) {
    Floats block[LANES];
    for (int n = 0; n < LANES; n += IS_WIDE ? 1 : 2)
      __builtin_prefetch(IS_WIDE ? w + n * I + i + AHEAD
                                 : w + LANES * I + i * LANES + n * LANES);
    for (int n = 0; n < LANES; ++n) block[n] = load(w + n * I + i);
    transpose_block(block);
    for (int n = 0; n < LANES; ++n)
      for (int r = 0; r < R; ++r)
        sums[r] = multiply_add(block[n], fill(x[r * I + i + n]), sums[r]);
  }
  for (; i < I; ++i) {
    Floats column;
    for (int n = 0; n < LANES; ++n) column[n] = w[n * I + i];
    for (int r = 0; r < R; ++r)
      sums[r] = multiply_add(column, fill(x[r * I + i]), sums[r]);
  }
  for (int r = 0; r < R; ++r) store(y + r * O, sums[r]);
}

// N outputs of V vectors of rows; x is [I, V * LANES], sums [N, PANEL].
template <int N, int V>
inline void tile(Weights weights, const float* x, float* sums) {
  const auto [w, I] = weights;
  Floats acc[N][V]{};
  auto add = [&](int64_t i) __attribute__((always_inline)) {
    Floats rows[V];
    for (int v = 0; v < V; ++v) rows[v] = load(x + (i * V + v) * LANES);
    for (int n = 0; n < N; ++n) {
      Floats weight = fill(w[n * I + i]);
      for (int v = 0; v < V; ++v) acc[n][v] = multiply_add(weight, rows[v], acc[n][v]);
    }
  };
  int64_t i = 0;
  for (; i + LANES <= I; i += LANES) {
    // A full panel computes for long enough to fetch the next tile in order meanwhile.
    for (int n = 0; n < N; ++n)
      __builtin_prefetch(V == MAX_VECTORS || !IS_WIDE ? w + N * I + i * N + n * LANES
                                          : w + n * I + i + AHEAD);
    for (int j = 0; j < LANES; ++j) add(i + j);
  }
  for (; i < I; ++i) add(i);
  for (int n = 0; n < N; ++n)
    for (int v = 0; v < V; ++v) store(sums + n * PANEL + v * LANES, acc[n][v]);
}

// A Source has `const float* block(int64_t begin, int64_t end) const`: the weights of these
// outputs, [end - begin, I], good until the thread's next call. At most OUTPUTS at a time.
template <class Source>
struct RowMatmul {
  Source source;
  const float* x_RI;
  const int32_t* valid_B;
  float* y_RO;
  int64_t R, I, O, B;
  // x in panels of up to PANEL rows, each [I, rows of the panel, padded]; for many rows.
  // Lanes of padding hold anything: they meet no other lane, and nothing stores them.
  const float* panels = nullptr;

  int num_tasks() const { return static_cast<int>((O + OUTPUTS - 1) / OUTPUTS); }

  // Rows come in B groups of one size, and only the first of each group count.
  bool is_padding(int64_t first, int64_t rows) const {
    int64_t T = R / B, last = first + rows - 1;
    return first / T == last / T && first % T >= valid_B[first / T];
  }

  static int64_t vectors_of(int64_t rows) {
    int64_t vectors = (rows + LANES - 1) / LANES;
    return vectors == 3 ? 4 : vectors;
  }

  // Before the tasks run; `room` must outlive them.
  void prepare(std::vector<float>& room) {
    if (R <= FEW_ROWS) return;
    int64_t whole = R / PANEL * PANEL;
    size_t size = (whole + vectors_of(R - whole) * LANES) * I;
    if (room.size() < size) room.resize(size);
    for (int64_t first = 0; first < R; first += PANEL) {
      int64_t rows = std::min<int64_t>(PANEL, R - first);
      if (is_padding(first, rows)) continue;
      transpose(x_RI + first * I, I, rows, I, room.data() + first * I,
                vectors_of(rows) * LANES);
    }
    panels = room.data();
  }

  void run(int task) const {
    int64_t begin = int64_t{task} * OUTPUTS, end = std::min(O, begin + OUTPUTS);
    switch (R) {
      case 1: return few_rows<1>(begin, end);
      case 2: return few_rows<2>(begin, end);
      case 3: return few_rows<3>(begin, end);
      case 4: return few_rows<4>(begin, end);
#ifdef __AVX512F__
      case 5: return few_rows<5>(begin, end);
      case 6: return few_rows<6>(begin, end);
      case 7: return few_rows<7>(begin, end);
      case 8: return few_rows<8>(begin, end);
#endif
      default: return many_rows(begin, end);
    }
  }

  template <int ROWS>
  void few_rows(int64_t begin, int64_t end) const {
    int64_t o = begin;
    for (; o + LANES <= end; o += LANES)
      outputs_in_lanes<ROWS>({source.block(o, o + LANES), I}, x_RI, y_RO + o, O);
    for (; o < end; ++o) {
      const float* w = source.block(o, o + 1);
      for (int r = 0; r < ROWS; ++r) {
        float sum = 0.0f;
        for (int64_t i = 0; i < I; ++i) sum = __builtin_fmaf(w[i], x_RI[r * I + i], sum);
        y_RO[r * O + o] = sum;
      }
    }
  }

  void many_rows(int64_t begin, int64_t end) const {
    alignas(64) float sums[OUTPUTS * PANEL];
    const float* w = nullptr;
    for (int64_t first = 0; first < R; first += PANEL) {
      int64_t rows = std::min<int64_t>(PANEL, R - first);
      if (is_padding(first, rows)) {
        for (int64_t r = first; r < first + rows; ++r)
          std::fill(y_RO + r * O + begin, y_RO + r * O + end, 0.0f);
        continue;
      }
      if (!w) w = source.block(begin, end);
      const float* x = panels + first * I;
      switch (vectors_of(rows)) {
        case 1: tiles<12, 1>(w, x, end - begin, sums); break;
        case 2: tiles<IS_WIDE ? 12 : 6, 2>(w, x, end - begin, sums); break;
        default: tiles<6, MAX_VECTORS>(w, x, end - begin, sums);
      }
      transpose(sums, PANEL, end - begin, rows, y_RO + first * O + begin, O);
    }
  }

  template <int N, int V>
  void tiles(const float* w, const float* x, int64_t outputs, float* sums) const {
    int64_t o = 0;
    for (; o + N <= outputs; o += N) tile<N, V>({w + o * I, I}, x, sums + o * PANEL);
    for (; o < outputs; ++o) tile<1, V>({w + o * I, I}, x, sums + o * PANEL);
  }
};

// Runs a product whose fields are set.
template <class Source>
void run_rows(xla::ffi::ThreadPool pool, std::shared_ptr<RowMatmul<Source>> call) {
  // Kept from call to call: fresh pages of memory would cost more than the packing.
  thread_local std::vector<float> room;
  call->prepare(room);
  run_tasks<RowMatmul<Source>>(pool, call);
}

}  // namespace headrace
