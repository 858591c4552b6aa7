// Rows times float32 weights on a CPU: ../cpu_rows.h over weights as they are stored.
// Compiled on the machine that runs it.

#include "../cpu_rows.h"

namespace {

namespace ffi = xla::ffi;

struct Stored {
  const float* w_OI;
  int64_t I;

  const float* block(int64_t begin, int64_t) const { return w_OI + begin * I; }
};

ffi::Error row_matmul(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x,
                      ffi::Buffer<ffi::F32> w, ffi::Buffer<ffi::S32> valid,
                      ffi::ResultBuffer<ffi::F32> y) {
  auto call = std::make_shared<headrace::RowMatmul<Stored>>();
  call->R = x.dimensions()[0], call->I = x.dimensions()[1], call->O = w.dimensions()[0];
  call->x_RI = x.typed_data(), call->source = {w.typed_data(), call->I};
  call->valid_B = valid.typed_data(), call->B = valid.dimensions()[0];
  call->y_RO = y->typed_data();
  headrace::run_rows(pool, call);
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(row_matmul_float32, row_matmul,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>());
