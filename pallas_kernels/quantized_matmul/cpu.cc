// Rows times quantized weights on a CPU: ../cpu_rows.h over weights that are made of the
// stored ones a few outputs at a time, (stored - zero) * scale, rounded once. So the bits
// are those of the float32 product with the dequantized weight, and memory is read in the
// stored size: decoding is bound by that. Compiled on the machine that runs it.

#include "../cpu_rows.h"

namespace {

namespace ffi = xla::ffi;
using headrace::Floats;
using headrace::Fp8;
using headrace::LANES;
using headrace::load;
using headrace::store;

// One group of a row: `size` stored values from the `at`-th of all on.
struct Int8 {
  static void widen(const uint8_t* stored, int64_t at, int64_t size, float scale, int zero,
                    float* to) {
    const int8_t* from = reinterpret_cast<const int8_t*>(stored) + at;
    for (int64_t i = 0; i < size; ++i) to[i] = static_cast<float>(from[i] - zero) * scale;
  }
};

// Two to a byte, the first in the lower half; groups begin at whole bytes.
struct Int4 {
  static void widen(const uint8_t* stored, int64_t at, int64_t size, float scale, int zero,
                    float* to) {
    const int8_t* from = reinterpret_cast<const int8_t*>(stored) + at / 2;
    for (int64_t i = 0; i < size / 2; ++i) {
      int pair = from[i];
      to[2 * i] = static_cast<float>((pair << 28 >> 28) - zero) * scale;
      to[2 * i + 1] = static_cast<float>((pair >> 4) - zero) * scale;
    }
  }
};

struct Float8 {
  static void widen(const uint8_t* stored, int64_t at, int64_t size, float scale, int,
                    float* to) {
    const Fp8* from = reinterpret_cast<const Fp8*>(stored) + at;
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES) store(to + i, load(from + i) * scale);
    Fp8 rest[LANES]{};
    std::copy(from + i, from + size, rest);
    Floats last = load(rest) * scale;
    for (int j = 0; i + j < size; ++j) to[i + j] = last[j];
  }
};

template <class Value>
struct Quantized {
  const uint8_t* values_OI;
  const float* scales_OS;
  const int8_t* zeros_OS;  // null: none
  int64_t I, S;

  const float* block(int64_t begin, int64_t end) const {
    thread_local std::vector<float> room;
    if (room.size() < static_cast<size_t>(headrace::OUTPUTS * I))
      room.resize(headrace::OUTPUTS * I);
    const int64_t size = I / S;
    float* to = room.data();
    for (int64_t group = begin * S; group < end * S; ++group, to += size)
      Value::widen(values_OI, group * size, size, scales_OS[group],
                   zeros_OS ? zeros_OS[group] : 0, to);
    return room.data();
  }
};

template <class Value>
ffi::Error quantized_matmul(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x,
                            ffi::AnyBuffer values, ffi::Buffer<ffi::F32> scales,
                            ffi::Buffer<ffi::S8> zeros, ffi::Buffer<ffi::S32> valid,
                            ffi::ResultBuffer<ffi::F32> y) {
  auto call = std::make_shared<headrace::RowMatmul<Quantized<Value>>>();
  call->R = x.dimensions()[0], call->I = x.dimensions()[1];
  call->O = scales.dimensions()[0], call->x_RI = x.typed_data();
  call->source = {static_cast<const uint8_t*>(values.untyped_data()), scales.typed_data(),
                  zeros.element_count() ? zeros.typed_data() : nullptr, call->I,
                  scales.dimensions()[1]};
  call->valid_B = valid.typed_data(), call->B = valid.dimensions()[0];
  call->y_RO = y->typed_data();
  headrace::run_rows(pool, call);
  return ffi::Error::Success();
}

}  // namespace

#define HEADRACE_QUANTIZED(symbol, Value)                                      \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(symbol, quantized_matmul<Value>,               \
                                ffi::Ffi::Bind()                               \
                                    .Ctx<ffi::ThreadPool>()                    \
                                    .Arg<ffi::Buffer<ffi::F32>>()              \
                                    .Arg<ffi::AnyBuffer>()                     \
                                    .Arg<ffi::Buffer<ffi::F32>>()              \
                                    .Arg<ffi::Buffer<ffi::S8>>()               \
                                    .Arg<ffi::Buffer<ffi::S32>>()              \
                                    .Ret<ffi::Buffer<ffi::F32>>())

HEADRACE_QUANTIZED(quantized_matmul_int8, Int8);
HEADRACE_QUANTIZED(quantized_matmul_int4, Int4);
HEADRACE_QUANTIZED(quantized_matmul_float8_e4m3fn, Float8);
