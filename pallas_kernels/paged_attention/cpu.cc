// Paged attention on a CPU: reads keys and values in their pages, where plain XLA must
// gather them first. Compiled on the machine that runs it, once per head size, with
//   -DHEADRACE_HEAD_DIM=H  a multiple of 16
// One task is one row, one kv head and a few query tokens. A query's arithmetic knows
// nothing but its own query, page table and limit, so its bits depend neither on the
// other rows nor on how many tokens or threads share the call.
//
// Pages of 8 bits have a scale per key and per value. It meets the score of a key and the
// weight of a value, not the numbers themselves.
//
// Online softmax over absolute blocks of 128 keys: Milakov and Gimelshein 2018.

#include "../cpu_tasks.h"

namespace {

namespace ffi = xla::ffi;
using headrace::fill;
using headrace::Floats;
using headrace::IS_WIDE;
using headrace::LANES;
using headrace::load;
using headrace::multiply_add;
using headrace::store;

constexpr int H = HEADRACE_HEAD_DIM;
constexpr int VECTORS = H / LANES;
constexpr int KEY_BLOCK = 128;
// Queries of one task, and of one pass over a block of keys.
constexpr int MAX_QUERIES = 64;
constexpr int TARGET_QUERIES = 24;
constexpr int TILE = IS_WIDE ? 4 : 3;
// Vectors of a query's output that one pass over a block of values sums up.
constexpr int OUT_VECTORS = VECTORS % 4 == 0 ? 4 : VECTORS % 2 == 0 ? 2 : 1;
constexpr float MASKED = -1e30f;
static_assert(H % LANES == 0, "the head size must be a multiple of 16");

// Whether pages of this type have scales.
template <class Element>
constexpr bool IS_SCALED = sizeof(Element) == 1;

typedef int32_t Ints __attribute__((vector_size(LANES * 4)));

// Adds lanes DISTANCE apart: those of a stay where bit DISTANCE of the lane is 0, those
// of b where it is 1.
template <int DISTANCE>
inline Floats fold(Floats a, Floats b) {
#define STAYS(i) ((i & DISTANCE) ? i + LANES : i)
#define COMES(i) ((i & DISTANCE) ? (i ^ DISTANCE) + LANES : (i ^ DISTANCE))
  return __builtin_shufflevector(a, b, HEADRACE_EACH_LANE(STAYS)) +
         __builtin_shufflevector(a, b, HEADRACE_EACH_LANE(COMES));
#undef STAYS
#undef COMES
}

// Products of one query with 2 * DISTANCE keys from FIRST on; after DISTANCE LANES / 2,
// lane i holds the whole product with key i.
template <int DISTANCE, int FIRST, class Element>
inline Floats dots(const Floats* q, const Element* keys) {
  if constexpr (DISTANCE == 0) {
    Floats sum = q[0] * load(keys + FIRST * H);
    for (int h = 1; h < VECTORS; ++h)
      sum = multiply_add(q[h], load(keys + FIRST * H + h * LANES), sum);
    return sum;
  } else {
    return fold<DISTANCE>(dots<DISTANCE / 2, FIRST>(q, keys),
                          dots<DISTANCE / 2, FIRST + DISTANCE>(q, keys));
  }
}

inline float sum_of(Floats v) {
  if constexpr (IS_WIDE) v = fold<8>(v, v);
  v = fold<4>(v, v);
  v = fold<2>(v, v);
  return fold<1>(v, v)[0];
}

inline float max_of(Floats v) {
  float top = v[0];
  for (int i = 1; i < LANES; ++i) top = std::max(top, v[i]);
  return top;
}

// exp for x <= 0, within 2 units in the last place; below -87 it stays at exp(-87).
// Source: Moshier, Cephes, expf.c: range reduction by ln 2 in two parts, polynomial.
inline Floats exp_of(Floats x) {
  x = x < fill(-87.0f) ? fill(-87.0f) : x;
  const float rounds = 12582912.0f;  // 1.5 * 2**23: adding it rounds to an integer
  Floats n = multiply_add(x, fill(1.44269504f), fill(rounds)) - rounds;
  Floats r = multiply_add(n, fill(-0.693359375f), x);
  r = multiply_add(n, fill(2.12194440e-4f), r);
  Floats p = fill(1.9875691500e-4f);
  for (float next : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f,
                     1.6666665459e-1f, 5.0000001201e-1f})
    p = multiply_add(p, r, fill(next));
  p = multiply_add(p * r, r, r) + 1.0f;
  Ints bits = (__builtin_convertvector(n, Ints) + 127) << 23;
  Floats power;
  std::memcpy(&power, &bits, sizeof power);
  return p * power;
}

// Up to 128 keys: where each page of the block begins.
template <class Element>
struct Block {
  const Element* k_pages[KEY_BLOCK / LANES];
  const Element* v_pages[KEY_BLOCK / LANES];
  // Of pages of 8 bits; else unused.
  const float* k_scales[KEY_BLOCK / LANES];
  const float* v_scales[KEY_BLOCK / LANES];
  int page_size;
  int first;     // position of the block's first key
  int num_keys;  // that any query of the task sees
};

struct Query {
  float q[H];
  float out[H];
  float top;
  float total;
  int limit;  // keys that it sees
};

// Turns scores of one block into weights, and rescales what the query has so far.
// Returns nothing new for keys that the query does not see: their weight is 0.
inline void weigh(float* score, int first, int num_keys, Query& query) {
  int seen = std::clamp(query.limit - first, 0, num_keys);
  int padded = (num_keys + LANES - 1) / LANES * LANES;
  for (int s = seen; s < padded; ++s) score[s] = MASKED;
  Floats tops = fill(query.top);
  for (int s = 0; s < padded; s += LANES) {
    Floats x = load(score + s);
    tops = x > tops ? x : tops;
  }
  float top = max_of(tops);
  float shrink = query.top == top ? 1.0f : exp_of(fill(query.top - top))[0];
  for (int s = 0; s < padded; s += LANES) store(score + s, exp_of(load(score + s) - top));
  for (int s = seen; s < padded; ++s) score[s] = 0.0f;
  Floats total{};
  for (int s = 0; s < padded; s += LANES) total += load(score + s);
  query.top = top;
  query.total = __builtin_fmaf(query.total, shrink, sum_of(total));
  for (int h = 0; h < H; h += LANES) store(query.out + h, load(query.out + h) * shrink);
}

// Adds weight times value over the block's keys, for OUT_VECTORS vectors from `begin` on.
template <int N, class Element>
inline void sum_values(const Block<Element>& block, const float (*weights)[KEY_BLOCK],
                       Query* queries, int begin) {
  const int C = block.page_size;
  Floats out[N][OUT_VECTORS];
  for (int n = 0; n < N; ++n)
    for (int v = 0; v < OUT_VECTORS; ++v)
      out[n][v] = load(queries[n].out + begin + v * LANES);
  // Values past the context are never read: they may be NaN, and 0 * NaN is NaN.
  for (int s = 0; s < block.num_keys; ++s) {
    const Element* value = block.v_pages[s / C] + s % C * H + begin;
    for (int n = 0; n < N; ++n) {
      Floats weight = fill(weights[n][s]);
      for (int v = 0; v < OUT_VECTORS; ++v)
        out[n][v] = multiply_add(weight, load(value + v * LANES), out[n][v]);
    }
  }
  for (int n = 0; n < N; ++n)
    for (int v = 0; v < OUT_VECTORS; ++v)
      store(queries[n].out + begin + v * LANES, out[n][v]);
}

template <int N, class Element>
void attend_block(const Block<Element>& block, Query* queries) {
  alignas(64) float score[N][KEY_BLOCK];
  const int C = block.page_size;
  Floats q[N][VECTORS];
  for (int n = 0; n < N; ++n)
    for (int h = 0; h < VECTORS; ++h) q[n][h] = load(queries[n].q + h * LANES);
  // A page's rows past the context are read too: their scores are masked.
  for (int s = 0; s < block.num_keys; s += LANES) {
    const Element* keys = block.k_pages[s / C] + s % C * H;
    for (int n = 0; n < N; ++n) {
      Floats products = dots<LANES / 2, 0>(q[n], keys);
      if constexpr (IS_SCALED<Element>) products *= load(block.k_scales[s / C] + s % C);
      store(score[n] + s, products);
    }
  }
  for (int n = 0; n < N; ++n) weigh(score[n], block.first, block.num_keys, queries[n]);
  if constexpr (IS_SCALED<Element>)
    // Past the context both may be anything; sum_values reads neither.
    for (int s = 0; s < block.num_keys; s += LANES)
      for (int n = 0; n < N; ++n)
        store(score[n] + s, load(score[n] + s) * load(block.v_scales[s / C] + s % C));
  for (int h = 0; h < H; h += OUT_VECTORS * LANES)
    sum_values<N>(block, score, queries, h);
}

template <class Element>
struct Call {
  const float* q_BTKGH;
  const Element *k_LPKCH, *v_LPKCH;
  const int32_t *table_BM, *positions_BT, *context_B;
  float* out_BTKGH;
  int B, T, K, G, M, P, C, layer, tokens_per_task;
  float scale;
  const float *k_scales_LPKC, *v_scales_LPKC;

  int num_chunks() const { return (T + tokens_per_task - 1) / tokens_per_task; }
  int num_tasks() const { return B * K * num_chunks(); }

  int64_t offset(int b, int t, int k) const {
    return ((static_cast<int64_t>(b) * T + t) * K + k) * G * H;
  }

  void run(int task) const {
    int chunk = task % num_chunks(), k = task / num_chunks() % K;
    int b = task / num_chunks() / K;
    int begin = chunk * tokens_per_task, end = std::min(T, begin + tokens_per_task);
    int num_queries = (end - begin) * G, longest = 0;
    Query queries[MAX_QUERIES];
    for (int n = 0; n < num_queries; ++n) {
      int t = begin + n / G;
      Query& query = queries[n];
      const float* from = q_BTKGH + offset(b, t, k) + n % G * H;
      for (int h = 0; h < H; ++h) query.q[h] = from[h] * scale, query.out[h] = 0.0f;
      query.top = MASKED, query.total = 0.0f;
      // A query at or past the context is padding.
      int position = positions_BT[b * T + t], context = std::min(context_B[b], M * C);
      query.limit = position < context ? position + 1 : 0;
      longest = std::max(longest, query.limit);
    }
    for (int first = 0; first < longest; first += KEY_BLOCK)
      attend(block_of(b, k, first, std::min(KEY_BLOCK, longest - first)), queries,
             num_queries);
    for (int n = 0; n < num_queries; ++n) {
      float* to = out_BTKGH + offset(b, begin + n / G, k) + n % G * H;
      float total = queries[n].total > 0.0f ? queries[n].total : 1.0f;
      for (int h = 0; h < H; ++h) to[h] = queries[n].out[h] / total;
    }
  }

  Block<Element> block_of(int b, int k, int first, int num_keys) const {
    Block<Element> block;
    block.page_size = C, block.first = first, block.num_keys = num_keys;
    for (int j = 0; j * C < num_keys; ++j) {
      int64_t page = table_BM[static_cast<int64_t>(b) * M + first / C + j];
      if (page < 0 || page >= P) page = 0;  // never outside the pool
      int64_t at = ((static_cast<int64_t>(layer) * P + page) * K + k) * C;
      block.k_pages[j] = k_LPKCH + at * H, block.v_pages[j] = v_LPKCH + at * H;
      if constexpr (IS_SCALED<Element>)
        block.k_scales[j] = k_scales_LPKC + at, block.v_scales[j] = v_scales_LPKC + at;
    }
    return block;
  }

  static void attend(const Block<Element>& block, Query* queries, int num_queries) {
    for (; num_queries >= TILE; queries += TILE, num_queries -= TILE)
      attend_block<TILE>(block, queries);
    if (num_queries == 3 && TILE > 3) attend_block<3>(block, queries);
    if (num_queries == 2) attend_block<2>(block, queries);
    if (num_queries == 1) attend_block<1>(block, queries);
  }
};

template <class Element>
ffi::Error paged_attention(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> q,
                           ffi::AnyBuffer k, ffi::AnyBuffer v,
                           ffi::Buffer<ffi::S32> table, ffi::Buffer<ffi::S32> positions,
                           ffi::Buffer<ffi::S32> context, ffi::Buffer<ffi::F32> k_scales,
                           ffi::Buffer<ffi::F32> v_scales,
                           ffi::ResultBuffer<ffi::F32> out, int64_t layer) {
  auto q_shape = q.dimensions(), pool_shape = k.dimensions();
  int G = static_cast<int>(q_shape[3]);
  if (G > MAX_QUERIES || q_shape[4] != H || pool_shape[3] % LANES != 0)
    return ffi::Error::InvalidArgument("shapes that this kernel was not built for");
  auto call = std::make_shared<Call<Element>>();
  *call = {
      q.typed_data(),
      static_cast<const Element*>(k.untyped_data()),
      static_cast<const Element*>(v.untyped_data()),
      table.typed_data(),
      positions.typed_data(),
      context.typed_data(),
      out->typed_data(),
      static_cast<int>(q_shape[0]),
      static_cast<int>(q_shape[1]),
      static_cast<int>(q_shape[2]),
      G,
      static_cast<int>(table.dimensions()[1]),
      static_cast<int>(pool_shape[1]),
      static_cast<int>(pool_shape[3]),
      static_cast<int>(layer),
      std::max(1, TARGET_QUERIES / G),
      1.0f / __builtin_sqrtf(static_cast<float>(H)),
      k_scales.typed_data(),
      v_scales.typed_data(),
  };
  headrace::run_tasks<Call<Element>>(pool, call);
  return ffi::Error::Success();
}

}  // namespace

#define HANDLER(symbol, Element)                                             \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(symbol, paged_attention<Element>,            \
                                ffi::Ffi::Bind()                             \
                                    .Ctx<ffi::ThreadPool>()                  \
                                    .Arg<ffi::Buffer<ffi::F32>>()            \
                                    .Arg<ffi::AnyBuffer>()                   \
                                    .Arg<ffi::AnyBuffer>()                   \
                                    .Arg<ffi::Buffer<ffi::S32>>()            \
                                    .Arg<ffi::Buffer<ffi::S32>>()            \
                                    .Arg<ffi::Buffer<ffi::S32>>()            \
                                    .Arg<ffi::Buffer<ffi::F32>>()            \
                                    .Arg<ffi::Buffer<ffi::F32>>()            \
                                    .Ret<ffi::Buffer<ffi::F32>>()            \
                                    .Attr<int64_t>("layer"))

HANDLER(paged_attention_float32, float);
HANDLER(paged_attention_bfloat16, uint16_t);
HANDLER(paged_attention_int8, int8_t);
HANDLER(paged_attention_float8_e4m3fn, headrace::Fp8);
