// Sums of rows on a CPU, each in one order, whatever the number of rows: XLA adds up 16 rows or more in another order than one.

#include "../native.h"

namespace {

constexpr int kChains = 4;          // sums under way, so that none waits for the one before
constexpr int64_t kAlone = 1 << 18; // numbers that one thread adds up sooner than it wakes another

struct Arguments {
  const float* x;  // [R, D]
  float* out;      // [R]
  int64_t rows, size;
};

template <bool OfSquares>
void SumRow(const Arguments& a, int64_t row, Scratch&) {
  const float* x = a.x + row * a.size;
  Lanes sums[kChains] = {};
  int64_t d = 0;
  const auto add = [&](int chain) {
    const Lanes numbers = *(const Lanes*)(x + d + chain * kLanes);
    sums[chain] = OfSquares ? MultiplyAdd(numbers, numbers, sums[chain]) : sums[chain] + numbers;
  };
  for (; d + kChains * kLanes <= a.size; d += kChains * kLanes)
    for (int chain = 0; chain < kChains; ++chain) add(chain);
  for (; d + kLanes <= a.size; d += kLanes) add(0);
  float sum = Sum((sums[0] + sums[1]) + (sums[2] + sums[3]));
  for (; d < a.size; ++d) sum = OfSquares ? std::fma(x[d], x[d], sum) : sum + x[d];
  a.out[row] = sum;
}

ffi::Error SumRows(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x, ffi::ResultBuffer<ffi::F32> out, bool of_squares) {
  const Shape shape = x.dimensions();
  if (!shape.size()) return ffi::Error::InvalidArgument("row_sum: x must have an axis");
  const Arguments a = {x.typed_data(), out->typed_data(), (int64_t)out->element_count(), shape.back()};
  if (a.rows * a.size != (int64_t)x.element_count())
    return ffi::Error::InvalidArgument("row_sum: there must be a sum of each row of " + Text(shape) + "; got " + Text(out->dimensions()));
  const AttendRow<Arguments> sum = of_squares ? SumRow<true> : SumRow<false>;
  if (a.rows * a.size > kAlone && a.rows > 1) return ForEachRow<Arguments>(pool, "row_sum", a, sum);
  Scratch scratch;
  for (int64_t row = 0; row < a.rows; ++row) sum(a, row, scratch);
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(RowSum, SumRows,
                              ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<ffi::Buffer<ffi::F32>>().Ret<ffi::Buffer<ffi::F32>>().Attr<bool>("of_squares"));
