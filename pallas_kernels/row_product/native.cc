// Products of a few rows with matrices on a CPU, at the speed of memory: each matrix is read once for all rows, as it lies.
// XLA's product of one row does so too, but with two rows it packs the matrix first, which takes as long again.
//
// A number of the result is one sum in float32, from the first input to the last, whatever the number of rows, of threads and of
// columns beside it; of matrices [F, D], as many sums as a vector has numbers, added at the end. So a row's bits do not depend on
// the other rows. Matrices are floats, bfloat16s, or codes of 8 bits, which become floats in registers: the result is theirs.

#include "../native.h"
#include "../wide.h"

namespace {

constexpr int64_t kInputs = 8;       // that are added to a sum in a register before it is stored
constexpr int64_t kOutputs = 64;     // columns of the smallest piece of work
constexpr int64_t kTurn = 1 << 19;   // bytes of matrices for which it pays to wake another thread
constexpr int kMostRows = kWide == 16 ? 8 : 4;  // rows whose sums the registers hold

// How a matrix stores numbers, and a vector of them as floats.
struct Floats {
  typedef float Number;
  static Wide Read(const float* from) { return *(const Wide*)from; }
};

struct BFloats {
  typedef uint16_t Number;
  static Wide Read(const uint16_t* from) { return FromBits(Widen(from) << 16); }
};

struct Whole8 {
  typedef int8_t Number;
  static Wide Read(const int8_t* from) { return __builtin_convertvector(Widen(from), Wide); }
};

// Floats of 8 bits, 4 of them the exponent's: their bits move to a float's place, whose exponents count from another number.
// Numbers below the smallest normal one are moved one exponent up, with a first digit that is taken off again.
struct Float8 {
  typedef uint8_t Number;
  static Wide Read(const uint8_t* from) {
    const WideInt code = Widen(from), size = code & 0x7F, moved = size << 20, is_small = moved < (1 << 23);
    const Wide number = FromBits(moved + (120 << 23) + (is_small & (1 << 23))) - FromBits(is_small & 0x3C800000);  // 2^-6
    WideInt bits;
    std::memcpy(&bits, &number, sizeof(bits));
    return FromBits((size == 0x7F ? WideInt{} + 0x7FC00000 : bits) | (code & 0x80) << 24);
  }
};

// The first number; nothing behind it is read.
template <typename Form>
inline float First(const typename Form::Number* from) {
  typename Form::Number of_vector[kWide] = {*from};
  return Form::Read(of_vector)[0];
}

struct Matrix {
  const void* numbers;  // [D, F], or [F, D]
  float* out;           // [R, F]
  int64_t outputs;      // F
  int64_t first;        // of its outputs, among those of all matrices
};

struct Arguments {
  const float* x;  // [R, D]
  std::vector<Matrix> matrices;
  int64_t num_x, inputs;
  int64_t width;  // outputs of a piece of work, among those of all matrices
  int64_t rows;   // pieces of work, as `ForEachRow` calls them
};

// Adds the products of `Inputs` neighbouring inputs, of `Rows` rows and `Columns` vectors of outputs.
template <typename Form, int Rows, int Columns, int Inputs>
inline void AddInputs(const float* x, int64_t size, const typename Form::Number* matrix, int64_t outputs, float* sum, int64_t stride) {
  Wide sums[Rows][Columns];
  for (int r = 0; r < Rows; ++r)
    for (int c = 0; c < Columns; ++c) sums[r][c] = *(Wide*)(sum + r * stride + c * kWide);
#pragma GCC unroll 4
  for (int i = 0; i < Inputs; ++i) {
    Prefetch(matrix + (i + Inputs) * outputs, Columns * kWide * sizeof(*matrix));
    Wide of_input[Columns];
    for (int c = 0; c < Columns; ++c) of_input[c] = Form::Read(matrix + i * outputs + c * kWide);
    for (int r = 0; r < Rows; ++r)
      for (int c = 0; c < Columns; ++c) sums[r][c] = MultiplyAdd(of_input[c], x[r * size + i] - Wide{}, sums[r][c]);
  }
  for (int r = 0; r < Rows; ++r)
    for (int c = 0; c < Columns; ++c) *(Wide*)(sum + r * stride + c * kWide) = sums[r][c];
}

// The same for `count` outputs.
template <typename Form, int Rows, int Columns, int Inputs>
__attribute__((noinline)) void AddToOutputs(const float* x, int64_t size, const typename Form::Number* matrix, int64_t outputs, int64_t count, float* sum,
                         int64_t stride) {
  int64_t f = 0;
  for (; f + Columns * kWide <= count; f += Columns * kWide)
    AddInputs<Form, Rows, Columns, Inputs>(x, size, matrix + f, outputs, sum + f, stride);
  for (; f + kWide <= count; f += kWide)
    for (int r = 0; r < Rows; ++r) AddInputs<Form, 1, 1, Inputs>(x + r * size, size, matrix + f, outputs, sum + r * stride + f, stride);
  for (; f < count; ++f)
    for (int i = 0; i < Inputs; ++i) {
      const float of_input = First<Form>(matrix + i * outputs + f);
      for (int r = 0; r < Rows; ++r) sum[r * stride + f] = std::fma(of_input, x[r * size + i], sum[r * stride + f]);
    }
}

template <typename Form>
inline void AddToRows(const Arguments& a, const Matrix& m, int64_t first_input, int64_t begin, int64_t count, float* sums, int64_t stride) {
  const auto* matrix = (const typename Form::Number*)m.numbers + first_input * m.outputs + begin;
  const float* x = a.x + first_input;
  int64_t r = 0;
  const auto at = [&](auto add) { add(x + r * a.inputs, a.inputs, matrix, m.outputs, count, sums + r * stride, stride); };
  if (first_input + kInputs > a.inputs) {  // the rest
    for (; r < a.num_x; ++r) at(AddToOutputs<Form, 1, 1, 1>);
    return;
  }
  if (kMostRows == 8)
    for (; r + 8 <= a.num_x; r += 8) at(AddToOutputs<Form, 8, 2, kInputs>);
  for (; r + 4 <= a.num_x; r += 4) at(AddToOutputs<Form, 4, 2, kInputs>);
  for (; r + 2 <= a.num_x; r += 2) at(AddToOutputs<Form, 2, 4, kInputs>);
  for (; r < a.num_x; ++r) at(AddToOutputs<Form, 1, 4, kInputs>);
}

// The outputs of a matrix [D, F] from `begin` to `end`. Sums lie beside each other until the end: rows of a result are often a
// power of two apart, and a processor's cache then keeps few of them.
template <typename Form>
void ByInput(const Arguments& a, const Matrix& m, int64_t begin, int64_t end, std::vector<float>& sums) {
  const int64_t count = end - begin, stride = (count / kWide + 1) * kWide;
  sums.assign(a.num_x * stride, 0.0f);
  int64_t d = 0;
  for (; d + kInputs <= a.inputs; d += kInputs) AddToRows<Form>(a, m, d, begin, count, sums.data(), stride);
  for (; d < a.inputs; ++d) AddToRows<Form>(a, m, d, begin, count, sums.data(), stride);
  for (int64_t r = 0; r < a.num_x; ++r) std::copy_n(sums.data() + r * stride, count, m.out + r * m.outputs + begin);
}

// Products of `Rows` rows with `Outputs` rows of a matrix [F, D].
template <typename Form, int Rows, int Outputs>
inline void Dots(const float* x, const typename Form::Number* matrix, int64_t size, int64_t outputs, float* out) {
  Wide sums[Outputs][Rows] = {};
  int64_t d = 0;
  for (; d + kWide <= size; d += kWide)
    for (int f = 0; f < Outputs; ++f) {
      Prefetch(matrix + (f + Outputs) * size + d, kWide * sizeof(*matrix));
      const Wide of_output = Form::Read(matrix + f * size + d);
      for (int r = 0; r < Rows; ++r) sums[f][r] = MultiplyAdd(of_output, *(const Wide*)(x + r * size + d), sums[f][r]);
    }
  for (int f = 0; f < Outputs; ++f)
    for (int r = 0; r < Rows; ++r) {
      float sum = SumOf(sums[f][r]);
      for (int64_t rest = d; rest < size; ++rest) sum = std::fma(First<Form>(matrix + f * size + rest), x[r * size + rest], sum);
      out[r * outputs + f] = sum;
    }
}

template <typename Form, int Outputs>
__attribute__((noinline)) void DotsOfRows(const Arguments& a, const Matrix& m, int64_t f) {
  const auto* matrix = (const typename Form::Number*)m.numbers + f * a.inputs;
  int64_t r = 0;
  const auto at = [&](auto dots) { dots(a.x + r * a.inputs, matrix, a.inputs, m.outputs, m.out + r * m.outputs + f); };
  for (; r + 4 <= a.num_x; r += 4) at(Dots<Form, 4, Outputs>);
  for (; r + 2 <= a.num_x; r += 2) at(Dots<Form, 2, Outputs>);
  for (; r < a.num_x; ++r) at(Dots<Form, 1, Outputs>);
}

// A piece of the outputs of a matrix [F, D].
template <typename Form>
void ByOutput(const Arguments& a, const Matrix& m, int64_t begin, int64_t end) {
  int64_t f = begin;
  for (; f + 4 <= end; f += 4) DotsOfRows<Form, 4>(a, m, f);
  for (; f < end; ++f) DotsOfRows<Form, 1>(a, m, f);
}

template <typename Form, bool IsByOutput>
void Piece(const Arguments& a, int64_t piece, Scratch& scratch) {
  for (const Matrix& m : a.matrices) {
    const int64_t begin = std::max<int64_t>(piece * a.width - m.first, 0), end = std::min((piece + 1) * a.width - m.first, m.outputs);
    if (begin < end) IsByOutput ? ByOutput<Form>(a, m, begin, end) : ByInput<Form>(a, m, begin, end, scratch.logits);
  }
}

template <typename Form>
AttendRow<Arguments> PieceOf(bool is_by_output) {
  return is_by_output ? Piece<Form, true> : Piece<Form, false>;
}

ffi::Error Multiply(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x, ffi::RemainingArgs of_matrices, ffi::RemainingRets of_results,
                    bool is_by_output) {
  const Shape of_x = x.dimensions();
  if (of_x.size() != 2 || !of_matrices.size() || of_matrices.size() != of_results.size())
    return ffi::Error::InvalidArgument("row_product: x must have 2 axes, and each matrix a result; got " + Text(of_x) + ", " +
                                       std::to_string(of_matrices.size()) + " and " + std::to_string(of_results.size()));
  Arguments a = {x.typed_data(), {}, of_x[0], of_x[1], 0, 0};
  int64_t all = 0;
  ffi::DataType dtype = ffi::DataType::INVALID;
  for (size_t i = 0; i < of_matrices.size(); ++i) {
    auto matrix = of_matrices.get<ffi::AnyBuffer>(i);
    auto result = of_results.get<ffi::Buffer<ffi::F32>>(i);
    if (!matrix.has_value()) return matrix.error();
    if (!result.has_value()) return result.error();
    const Shape shape = matrix->dimensions();
    const int64_t outputs = shape.size() == 2 ? shape[is_by_output ? 0 : 1] : 0;
    std::string error;
    if (i && matrix->element_type() != dtype) error = "all matrices must have one dtype";
    dtype = matrix->element_type();
    const std::vector<int64_t> wanted = is_by_output ? std::vector<int64_t>{outputs, a.inputs} : std::vector<int64_t>{a.inputs, outputs};
    if (!error.empty() || !Fits("a matrix", shape, wanted, error) || !Fits("its result", (*result)->dimensions(), {a.num_x, outputs}, error))
      return ffi::Error::InvalidArgument("row_product: " + error);
    a.matrices.push_back({matrix->untyped_data(), (*result)->typed_data(), outputs, all});
    all += outputs;
  }
  // As few pieces as keep the threads busy to the end, since a long run of columns is read faster. A thread reads floats from
  // memory about as fast as it multiplies four rows with them.
  const int64_t work = all * a.inputs * std::max<int64_t>(sizeof(float), a.num_x);
  const int64_t threads = std::clamp<int64_t>(work / kTurn, 1, pool.num_threads()), pieces = threads > 1 ? 2 * threads : 1;
  a.width = std::max<int64_t>((all / pieces + kOutputs) / kOutputs * kOutputs, kOutputs);
  a.rows = (all + a.width - 1) / a.width;
  AttendRow<Arguments> piece;
  switch (dtype) {
    case ffi::DataType::F32: piece = PieceOf<Floats>(is_by_output); break;
    case ffi::DataType::BF16: piece = PieceOf<BFloats>(is_by_output); break;
    case ffi::DataType::S8: piece = Piece<Whole8, false>; break;
    case ffi::DataType::F8E4M3FN: piece = Piece<Float8, false>; break;
    default: piece = nullptr;
  }
  if (!piece || (is_by_output && dtype != ffi::DataType::F32 && dtype != ffi::DataType::BF16))
    return ffi::Error::InvalidArgument("row_product: matrices must hold float32 or bfloat16, or [D, F] int8 or float8_e4m3fn");
  return ForEachRow<Arguments>(pool, "row_product", a, piece);
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(RowProduct, Multiply,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attr<bool>("is_by_output"));
