// What the C++ kernels of the CPU share: vectors of floats, and tasks on XLA's threads.
#pragma once

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <memory>
#include <mutex>

#ifdef __x86_64__
#include <immintrin.h>
#endif

#include "xla/ffi/api/ffi.h"

#if !defined(__FMA__) && !defined(__aarch64__)
#error "this processor has no fused multiply-add, which these kernels are made of"
#endif

namespace headrace {

// A vector fills one register. With 16 lanes there are 32 registers (AVX-512); with 8
// there may be only 16 (AVX2), so tiles are smaller.
#ifdef __AVX512F__
constexpr int LANES = 16;
#define HEADRACE_EACH_LANE(f)                                                       \
  f(0), f(1), f(2), f(3), f(4), f(5), f(6), f(7), f(8), f(9), f(10), f(11), f(12), \
      f(13), f(14), f(15)
#else
constexpr int LANES = 8;
#define HEADRACE_EACH_LANE(f) f(0), f(1), f(2), f(3), f(4), f(5), f(6), f(7)
#endif
constexpr bool IS_WIDE = LANES == 16;
typedef float Floats __attribute__((vector_size(LANES * 4)));

inline Floats load(const float* from) {
  Floats value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

// bfloat16 is the upper half of a float.
inline Floats load(const uint16_t* from) {
  typedef uint16_t Halves __attribute__((vector_size(LANES * 2)));
  typedef uint32_t Words __attribute__((vector_size(LANES * 4)));
  Halves halves;
  std::memcpy(&halves, from, sizeof halves);
  Words words = __builtin_convertvector(halves, Words) << 16;
  Floats value;
  std::memcpy(&value, &words, sizeof value);
  return value;
}

inline Floats load(const int8_t* from) {
  typedef int8_t Bytes __attribute__((vector_size(LANES)));
  Bytes bytes;
  std::memcpy(&bytes, from, sizeof bytes);
  return __builtin_convertvector(bytes, Floats);
}

// float8_e4m3fn: a sign, 4 bits of exponent with bias 7, 3 of mantissa, no infinity.
struct Fp8 {
  uint8_t bits;
};

// Exact, and without subnormal floats on the way: the processor may take them for 0.
inline Floats load(const Fp8* from) {
  typedef uint8_t Bytes __attribute__((vector_size(LANES)));
  typedef int32_t Words __attribute__((vector_size(LANES * 4)));
  Bytes bytes;
  std::memcpy(&bytes, from, sizeof bytes);
  Words all = __builtin_convertvector(bytes, Words), size = all & 127;
  Words is_small = size < 8;  // no leading one: (1 + m / 8 - 1) * 2^-6
  Words bits = (size << 20) + (is_small ? Words{} + (121 << 23) : Words{} + (120 << 23));
  bits = size == 127 ? Words{} + 0x7fc00000 : bits;
  Floats value;
  std::memcpy(&value, &bits, sizeof value);
  value = is_small ? value - 0.015625f : value;
  std::memcpy(&bits, &value, sizeof bits);
  bits |= (all & 128) << 24;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

inline void store(float* to, Floats value) { std::memcpy(to, &value, sizeof value); }

// Written out: `Floats{} + x` would add a zero, which is not free.
inline Floats fill(float x) {
#define HEADRACE_X(lane) x
  return Floats{HEADRACE_EACH_LANE(HEADRACE_X)};
#undef HEADRACE_X
}

// a * b + c in one rounding. Written so, and with contraction off: which sums a compiler
// fuses by itself differs from one copy of a template to the next, and so would the bits.
inline Floats multiply_add(Floats a, Floats b, Floats c) {
#ifdef __AVX512F__
  return (Floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
  return (Floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
  for (int i = 0; i < LANES; ++i) c[i] = __builtin_fmaf(a[i], b[i], c[i]);
  return c;
#endif
}

#ifdef __AVX512F__
// One of the steps that transpose 16 vectors: swaps blocks of DISTANCE lanes.
template <int DISTANCE>
inline void swap_blocks(Floats* rows) {
#define HEADRACE_LOW(l) ((l & DISTANCE) ? LANES + l - DISTANCE : l)
#define HEADRACE_HIGH(l) ((l & DISTANCE) ? LANES + l : l + DISTANCE)
  for (int i = 0; i < LANES; ++i) {
    if (i & DISTANCE) continue;
    Floats a = rows[i], b = rows[i + DISTANCE];
    rows[i] = __builtin_shufflevector(a, b, HEADRACE_EACH_LANE(HEADRACE_LOW));
    rows[i + DISTANCE] = __builtin_shufflevector(a, b, HEADRACE_EACH_LANE(HEADRACE_HIGH));
  }
#undef HEADRACE_LOW
#undef HEADRACE_HIGH
}

inline void transpose_block(Floats* rows) {
  swap_blocks<8>(rows);
  swap_blocks<4>(rows);
  swap_blocks<2>(rows);
  swap_blocks<1>(rows);
}
#else
// Of 8 vectors, in steps that are one instruction each on AVX2: pairs of floats, then
// pairs of pairs within halves, then halves.
inline void transpose_block(Floats* rows) {
  Floats pairs[LANES], quads[LANES];
  for (int i = 0; i < LANES; i += 2) {
    Floats a = rows[i], b = rows[i + 1];
    pairs[i] = __builtin_shufflevector(a, b, 0, 8, 1, 9, 4, 12, 5, 13);
    pairs[i + 1] = __builtin_shufflevector(a, b, 2, 10, 3, 11, 6, 14, 7, 15);
  }
  for (int i = 0; i < LANES; i += 4)
    for (int j = 0; j < 2; ++j) {
      Floats a = pairs[i + j], b = pairs[i + j + 2];
      quads[i + 2 * j] = __builtin_shufflevector(a, b, 0, 1, 8, 9, 4, 5, 12, 13);
      quads[i + 2 * j + 1] = __builtin_shufflevector(a, b, 2, 3, 10, 11, 6, 7, 14, 15);
    }
  for (int i = 0; i < 4; ++i) {
    Floats a = quads[i], b = quads[i + 4];
    rows[i] = __builtin_shufflevector(a, b, 0, 1, 2, 3, 8, 9, 10, 11);
    rows[i + 4] = __builtin_shufflevector(a, b, 4, 5, 6, 7, 12, 13, 14, 15);
  }
}
#endif

// to[c * to_stride + r] = from[r * from_stride + c] for r < rows, c < columns.
inline void transpose(const float* from, int64_t from_stride, int64_t rows,
                      int64_t columns, float* to, int64_t to_stride) {
  int64_t r = 0;
  for (; r + LANES <= rows; r += LANES) {
    int64_t c = 0;
    for (; c + LANES <= columns; c += LANES) {
      Floats block[LANES];
      for (int i = 0; i < LANES; ++i) block[i] = load(from + (r + i) * from_stride + c);
      transpose_block(block);
      for (int i = 0; i < LANES; ++i) store(to + (c + i) * to_stride + r, block[i]);
    }
    for (int i = 0; i < LANES; ++i)
      for (int64_t rest = c; rest < columns; ++rest)
        to[rest * to_stride + r + i] = from[(r + i) * from_stride + rest];
  }
  for (; r < rows; ++r)
    for (int64_t c = 0; c < columns; ++c) to[c * to_stride + r] = from[r * from_stride + c];
}

// Runs call->run(0) .. call->run(call->num_tasks() - 1), each once, on all threads of
// XLA's pool. Tasks are handed out one by one, since they differ in size. The calling
// thread works too, so a pool without a free thread delays nothing.
template <class Call>
void run_tasks(xla::ffi::ThreadPool pool, std::shared_ptr<const Call> call) {
  struct Progress {
    std::atomic<int> next{0}, done{0};
    std::mutex mutex;
    std::condition_variable all_done;
  };
  auto progress = std::make_shared<Progress>();
  const int total = call->num_tasks();
  auto help = [call, progress, total] {
    int mine = 0;
    for (int task; (task = progress->next.fetch_add(1)) < total; ++mine) call->run(task);
    if (mine > 0 && progress->done.fetch_add(mine) + mine == total) {
      std::lock_guard<std::mutex> lock(progress->mutex);
      progress->all_done.notify_all();
    }
  };
  int helpers = static_cast<int>(std::min<int64_t>(pool.num_threads(), total)) - 1;
  for (int i = 0; i < helpers; ++i) pool.Schedule([help] { help(); });
  help();
  std::unique_lock<std::mutex> lock(progress->mutex);
  progress->all_done.wait(lock, [&] { return progress->done.load() == total; });
}

}  // namespace headrace
