// Log-probabilities of rows on a CPU, each computed in the same way whatever the number of rows. XLA adds up 16 rows or more in
// another order than one, takes logarithms of a few rows in other instructions, and fuses the last subtraction in small programs.

#include "../native.h"

namespace {

constexpr int kChains = 4;           // sums under way, so that none waits for the one before
constexpr int64_t kAlone = 1 << 16;  // numbers that one thread computes sooner than it wakes another

struct Arguments {
  const float* x;  // [R, V]
  float* out;      // [R, V]
  int64_t rows, size;
};

void LogSoftmaxOfRow(const Arguments& a, int64_t row, Scratch&) {
  const float* x = a.x + row * a.size;
  float* out = a.out + row * a.size;
  Lanes sums[kChains] = {};
  int64_t v = 0;
  for (; v + kLanes <= a.size; v += kLanes) sums[v / kLanes % kChains] += Exp(*(const Lanes*)(x + v));
  if (v < a.size) {
    Lanes rest = Lanes{} + kNone;
    std::memcpy(&rest, x + v, (a.size - v) * sizeof(float));
    sums[0] += Exp(rest);
  }
  const float total = std::log(Sum((sums[0] + sums[1]) + (sums[2] + sums[3])));
  for (v = 0; v < a.size; ++v) out[v] = x[v] - total;
}

ffi::Error LogSoftmaxOfRows(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x, ffi::ResultBuffer<ffi::F32> out) {
  const Shape shape = x.dimensions();
  if (!shape.size() || !(out->dimensions() == shape))
    return ffi::Error::InvalidArgument("log_softmax: x must have an axis, and the result its shape; got " + Text(shape) + " and " +
                                       Text(out->dimensions()));
  const int64_t size = shape.back(), count = x.element_count();
  const Arguments a = {x.typed_data(), out->typed_data(), size ? count / size : 0, size};
  if (count > kAlone && a.rows > 1) return ForEachRow<Arguments>(pool, "log_softmax", a, LogSoftmaxOfRow);
  Scratch scratch;
  for (int64_t row = 0; row < a.rows; ++row) LogSoftmaxOfRow(a, row, scratch);
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(LogSoftmax, LogSoftmaxOfRows,
                              ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<ffi::Buffer<ffi::F32>>().Ret<ffi::Buffer<ffi::F32>>());
