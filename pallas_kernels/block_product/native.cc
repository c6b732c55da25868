// Products of rows with matrices in blocks, as GGUF files have them, on a CPU: each block becomes floats in registers, or for more
// rows in a tile that the processor's cache holds. The blocks are read once, and no matrix of floats is ever in memory.
//
// A number of the result is one sum in float32 over its output's weights: as many sums as a vector has numbers, added at the end.
// So a row's bits do not depend on the other rows, and they are those of `row_product` with a float32 matrix [F, D].
//
// A weight is what the package gguf decodes, bit by bit: a float16 scale times an integer scale times a code has at most 24 digits,
// so only the sum with an offset is rounded, with a fused multiply-add or without.

#include "../native.h"
#include "../wide.h"

namespace {

constexpr int kOutputs = 4;                          // that are multiplied at once
constexpr int kFewRows = 4;                          // whose sums the registers hold beside those blocks
constexpr int kTileRows = kWide == 16 ? 4 : 2;       // the same beside floats
constexpr int64_t kTileOutputs = 32, kTileBytes = 1 << 18;
constexpr int64_t kTurn = 1 << 18;                   // multiplications for which it pays to wake another thread

inline float Half(const uint8_t* from) {
  uint16_t bits;
  std::memcpy(&bits, from, sizeof(bits));
#if defined(__F16C__)
  return _cvtsh_ss(bits);
#else
  float number;
  FromHalf(&bits, 1, &number);
  return number;
#endif
}

inline Wide Number(WideInt code) { return __builtin_convertvector(code, Wide); }

// scale * code + low, of codes with four bits, or five of which the fifth ones are given apart.
#if defined(__AVX512F__)
constexpr Wide kCodes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

struct FourBits {
  Wide of_code;  // a processor looks numbers up sooner than it computes them
  FourBits(float scale, float low) : of_code(MultiplyAdd(kCodes, scale - Wide{}, low - Wide{})) {}
  Wide At(WideInt code) const { return (Wide)_mm512_permutexvar_ps((__m512i)code, (__m512)of_code); }
};

typedef __mmask16 Fifths;  // the fifth bits of a vector of codes

struct FiveBits {
  FourBits first, second;
  FiveBits(float scale, float low) : first(scale, low), second(0, 0) {
    second.of_code = MultiplyAdd(kCodes + 16.0f, scale - Wide{}, low - Wide{});
  }
  Wide At(WideInt code, Fifths fifth) const {
    return (Wide)_mm512_mask_permutexvar_ps((__m512)first.At(code), fifth, (__m512i)code, (__m512)second.of_code);
  }
};

inline Fifths FifthsOf(uint32_t bits) { return (Fifths)bits; }
inline Fifths FifthsOf(WideInt bytes, int bit) { return _mm512_test_epi32_mask((__m512i)bytes, _mm512_set1_epi32(1 << bit)); }
#else
struct FourBits {
  float scale, low;
  FourBits(float scale, float low) : scale(scale), low(low) {}
  Wide At(WideInt code) const { return MultiplyAdd(Number(code & 15), scale - Wide{}, low - Wide{}); }
};

typedef WideInt Fifths;  // the fifth bits of a vector of codes, as 16 or 0

struct FiveBits : FourBits {
  using FourBits::FourBits;
  Wide At(WideInt code, Fifths fifth) const { return MultiplyAdd(Number((code & 15) | fifth), scale - Wide{}, low - Wide{}); }
};

inline Fifths FifthsOf(uint32_t bits) {
  WideInt found;
  for (int i = 0; i < kWide; ++i) found[i] = (bits >> i & 1) << 4;
  return found;
}

inline Fifths FifthsOf(WideInt bytes, int bit) { return (bytes >> bit & 1) << 4; }
#endif

#define INLINE inline __attribute__((always_inline))

// The types of blocks. `Decode` passes on each vector of numbers of a block with its place among them, in order.
// The low four bits of some bytes, and then the high ones; `fifth` gives the fifth bits of a vector of either.
template <int Bytes, typename Emit>
INLINE void Nibbles(const uint8_t* from, FourBits low, FourBits high, int place, Emit emit) {
#pragma GCC unroll 4
  for (int v = 0; v < Bytes / kWide; ++v) emit(place + v, low.At(Widen(from + v * kWide)));
#pragma GCC unroll 4
  for (int v = 0; v < Bytes / kWide; ++v) emit(place + Bytes / kWide + v, high.At(Widen(from + v * kWide) >> 4));
}

template <int Bytes, typename GetFifth, typename Emit>
INLINE void FiveBitNumbers(const uint8_t* from, FiveBits low, FiveBits high, GetFifth fifth, int place, Emit emit) {
#pragma GCC unroll 4
  for (int v = 0; v < Bytes / kWide; ++v) emit(place + v, low.At(Widen(from + v * kWide), fifth(0, v)));
#pragma GCC unroll 4
  for (int v = 0; v < Bytes / kWide; ++v)
    emit(place + Bytes / kWide + v, high.At(Widen(from + v * kWide) >> 4, fifth(1, v)));
}

struct Q4_0 {
  static constexpr int kWeights = 32, kBytes = 18;
  template <typename Emit>
  static INLINE void Decode(const uint8_t* block, Emit emit) {
    const float scale = Half(block);
    const FourBits numbers(scale, -8 * scale);
    Nibbles<16>(block + 2, numbers, numbers, 0, emit);
  }
};

struct Q4_1 {
  static constexpr int kWeights = 32, kBytes = 20;
  template <typename Emit>
  static INLINE void Decode(const uint8_t* block, Emit emit) {
    const FourBits numbers(Half(block), Half(block + 2));
    Nibbles<16>(block + 4, numbers, numbers, 0, emit);
  }
};

// Behind the scales: 32 fifth bits, and then four of each.
template <typename Emit>
INLINE void Fives(const uint8_t* from, FiveBits numbers, Emit emit) {
  uint32_t bits;
  std::memcpy(&bits, from, sizeof(bits));
  const auto fifth = [&](int half, int v) { return FifthsOf(bits >> (half * 16 + v * kWide)); };
  FiveBitNumbers<16>(from + 4, numbers, numbers, fifth, 0, emit);
}

struct Q5_0 {
  static constexpr int kWeights = 32, kBytes = 22;
  template <typename Emit>
  static INLINE void Decode(const uint8_t* block, Emit emit) {
    const float scale = Half(block);
    Fives(block + 2, FiveBits(scale, -16 * scale), emit);
  }
};

struct Q5_1 {
  static constexpr int kWeights = 32, kBytes = 24;
  template <typename Emit>
  static INLINE void Decode(const uint8_t* block, Emit emit) {
    Fives(block + 4, FiveBits(Half(block), Half(block + 2)), emit);
  }
};

struct Q8_0 {
  static constexpr int kWeights = 32, kBytes = 34;
  template <typename Emit>
  static INLINE void Decode(const uint8_t* block, Emit emit) {
    const float scale = Half(block);
#pragma GCC unroll 4
    for (int v = 0; v < kWeights / kWide; ++v) emit(v, Number(Widen((const int8_t*)block + 2 + v * kWide)) * scale);
  }
};

// The scale and the offset of each 32 weights of Q4_K and Q5_K: eight of each, of six bits.
struct SubScales {
  float scale[8], low[8];
  INLINE SubScales(const uint8_t* block) {
    const float of_scales = Half(block), of_lows = -Half(block + 2);
    const uint8_t* packed = block + 4;
#pragma GCC unroll 8
    for (int i = 0; i < 4; ++i) {
      scale[i] = of_scales * (packed[i] & 63);
      low[i] = of_lows * (packed[i + 4] & 63);
      scale[i + 4] = of_scales * ((packed[i + 8] & 15) | packed[i] >> 6 << 4);
      low[i + 4] = of_lows * (packed[i + 8] >> 4 | packed[i + 4] >> 6 << 4);
    }
  }
};

struct Q4_K {
  static constexpr int kWeights = 256, kBytes = 144;
  template <typename Emit>
  static INLINE void Decode(const uint8_t* block, Emit emit) {
    const SubScales sub(block);
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i)
      Nibbles<32>(block + 16 + 32 * i, FourBits(sub.scale[2 * i], sub.low[2 * i]), FourBits(sub.scale[2 * i + 1], sub.low[2 * i + 1]),
                  i * 64 / kWide, emit);
  }
};

struct Q5_K {
  static constexpr int kWeights = 256, kBytes = 176;
  template <typename Emit>
  static INLINE void Decode(const uint8_t* block, Emit emit) {
    const SubScales sub(block);
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      const auto fifth = [&](int half, int v) { return FifthsOf(Widen(block + 16 + v * kWide), 2 * i + half); };
      FiveBitNumbers<32>(block + 48 + 32 * i, FiveBits(sub.scale[2 * i], sub.low[2 * i]),
                         FiveBits(sub.scale[2 * i + 1], sub.low[2 * i + 1]), fifth, i * 64 / kWide, emit);
    }
  }
};

struct Q6_K {
  static constexpr int kWeights = 256, kBytes = 210;
  template <typename Emit>
  static INLINE void Decode(const uint8_t* block, Emit emit) {
    const float of_scales = Half(block + 208);
    const int8_t* scales = (const int8_t*)block + 192;
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) {  // 32 weights: four bits of each in one half of 32 bytes, two in a quarter of as many
      const uint8_t *low = block + i / 4 * 64 + i % 2 * 32, *high = block + 128 + i / 4 * 32;
#pragma GCC unroll 4
      for (int v = 0; v < 32 / kWide; ++v) {
        const WideInt code = (Widen(low + v * kWide) >> (i % 4 / 2 * 4) & 15) | (Widen(high + v * kWide) >> (i % 4 * 2) & 3) << 4;
        emit(i * 32 / kWide + v, Number(code - 32) * (of_scales * scales[2 * i + v * kWide / 16]));
      }
    }
  }
};

struct Matrix {
  const uint8_t* blocks;  // [F, bytes of a row]
  float* out;             // [R, F]
  int64_t outputs;        // F
  int64_t first;          // of its outputs, among those of all matrices
  int64_t kind;           // as GGUF files number them
};

struct Arguments {
  const float* x;  // [R, D]
  std::vector<Matrix> matrices;
  int64_t num_x, inputs;
  int64_t width;  // outputs of a piece of work, among those of all matrices
  int64_t rows;   // pieces of work, as `ForEachRow` calls them
};

// Products of `Rows` rows with `Outputs` rows of blocks.
template <typename Form, int Rows, int Outputs>
__attribute__((noinline)) void DotsOfBlocks(const float* x, int64_t size, const uint8_t* blocks, int64_t outputs, float* out) {
  const int64_t num_blocks = size / Form::kWeights, stride = num_blocks * Form::kBytes;
  Wide sums[Outputs][Rows] = {};
  for (int64_t i = 0; i < num_blocks; ++i)
#pragma GCC unroll 4
    for (int f = 0; f < Outputs; ++f) {
      const uint8_t* block = blocks + f * stride + i * Form::kBytes;
      Prefetch(block + Outputs * stride, Form::kBytes);
      Form::Decode(block, [&](int place, Wide numbers) __attribute__((always_inline)) {
#pragma GCC unroll 4
        for (int r = 0; r < Rows; ++r)
          sums[f][r] = MultiplyAdd(numbers, *(const Wide*)(x + r * size + i * Form::kWeights + place * kWide), sums[f][r]);
      });
    }
  for (int f = 0; f < Outputs; ++f)
    for (int r = 0; r < Rows; ++r) out[r * outputs + f] = SumOf(sums[f][r]);
}

// A vector that a compiler must not read from memory anew for each use, of which a processor does one at a time.
inline Wide InRegister(Wide x) {
#if defined(__AVX512F__)
  asm("" : "+v"(x));
#endif
  return x;
}

// The same with rows of floats.
template <int Rows, int Outputs>
__attribute__((noinline)) void DotsOfFloats(const float* x, int64_t size, const float* matrix, int64_t outputs, float* out) {
  Wide sums[Outputs][Rows] = {};
  for (int64_t d = 0; d < size; d += kWide) {
    Wide of_rows[Rows];
#pragma GCC unroll 4
    for (int r = 0; r < Rows; ++r) of_rows[r] = InRegister(*(const Wide*)(x + r * size + d));
#pragma GCC unroll 4
    for (int f = 0; f < Outputs; ++f) {
      const Wide numbers = InRegister(*(const Wide*)(matrix + f * size + d));
#pragma GCC unroll 4
      for (int r = 0; r < Rows; ++r) sums[f][r] = MultiplyAdd(numbers, of_rows[r], sums[f][r]);
    }
  }
  for (int f = 0; f < Outputs; ++f)
    for (int r = 0; r < Rows; ++r) out[r * outputs + f] = SumOf(sums[f][r]);
}

// `run<Outputs>(f)` for all outputs from `begin` to `end`.
template <typename Run>
INLINE void ForOutputs(int64_t begin, int64_t end, Run run) {
  int64_t f = begin;
  for (; f + kOutputs <= end; f += kOutputs) run(std::integral_constant<int, kOutputs>(), f);
  for (; f < end; ++f) run(std::integral_constant<int, 1>(), f);
}

template <typename Form, int Rows>
void FewRows(const Arguments& a, const Matrix& m, int64_t begin, int64_t end) {
  const int64_t stride = a.inputs / Form::kWeights * Form::kBytes;
  ForOutputs(begin, end, [&](auto outputs, int64_t f) {
    DotsOfBlocks<Form, Rows, outputs.value>(a.x, a.inputs, m.blocks + f * stride, m.outputs, m.out + f);
  });
}

template <typename Form>
void DecodeOutputs(const Arguments& a, const Matrix& m, int64_t begin, int64_t end, float* numbers) {
  const int64_t num_blocks = a.inputs / Form::kWeights;
  const uint8_t* blocks = m.blocks + begin * num_blocks * Form::kBytes;
  for (int64_t i = 0; i < (end - begin) * num_blocks; ++i)
    Form::Decode(blocks + i * Form::kBytes, [&](int place, Wide of_block) __attribute__((always_inline)) {
      *(Wide*)(numbers + i * Form::kWeights + place * kWide) = of_block;
    });
}

template <int Rows>
INLINE void RowsOfTile(const Arguments& a, const Matrix& m, int64_t row, int64_t begin, int64_t end, const float* numbers) {
  ForOutputs(begin, end, [&](auto outputs, int64_t f) {
    DotsOfFloats<Rows, outputs.value>(a.x + row * a.inputs, a.inputs, numbers + (f - begin) * a.inputs, m.outputs,
                                      m.out + row * m.outputs + f);
  });
}

template <typename Form>
void ManyRows(const Arguments& a, const Matrix& m, int64_t begin, int64_t end, std::vector<float>& page) {
  const int64_t most = std::clamp<int64_t>(kTileBytes / 4 / a.inputs / kOutputs * kOutputs, kOutputs, kTileOutputs);
  const int64_t outputs = a.num_x > 16 ? most : kOutputs;  // few rows stay in the nearest cache, whose rest holds these
  page.resize(outputs * a.inputs + kWide);
  float* numbers = (float*)(((uintptr_t)page.data() + sizeof(Wide) - 1) / sizeof(Wide) * sizeof(Wide));  // loads of one cache line
  for (int64_t f = begin; f < end; f += outputs) {
    const int64_t last = std::min(f + outputs, end);
    DecodeOutputs<Form>(a, m, f, last, numbers);
    int64_t row = 0;
    for (; row + kTileRows <= a.num_x; row += kTileRows) RowsOfTile<kTileRows>(a, m, row, f, last, numbers);
    if (kTileRows > 2 && row + 2 <= a.num_x) RowsOfTile<2>(a, m, row, f, last, numbers), row += 2;
    if (row < a.num_x) RowsOfTile<1>(a, m, row, f, last, numbers);
  }
}

template <typename Form>
void Outputs(const Arguments& a, const Matrix& m, int64_t begin, int64_t end, Scratch& scratch) {
  switch (a.num_x) {
    case 1: return FewRows<Form, 1>(a, m, begin, end);
    case 2: return FewRows<Form, 2>(a, m, begin, end);
    case 3: return FewRows<Form, 3>(a, m, begin, end);
    case kFewRows: return FewRows<Form, kFewRows>(a, m, begin, end);
    default: return ManyRows<Form>(a, m, begin, end, scratch.page);
  }
}

struct Kind {
  int64_t kind, weights, bytes;
  void (*outputs)(const Arguments&, const Matrix&, int64_t begin, int64_t end, Scratch&);
};

template <typename Form>
constexpr Kind KindOf(int64_t kind) {
  return {kind, Form::kWeights, Form::kBytes, Outputs<Form>};
}

constexpr Kind kKinds[] = {KindOf<Q4_0>(2), KindOf<Q4_1>(3),  KindOf<Q5_0>(6),  KindOf<Q5_1>(7),
                           KindOf<Q8_0>(8), KindOf<Q4_K>(12), KindOf<Q5_K>(13), KindOf<Q6_K>(14)};

const Kind* Find(int64_t kind) {
  const Kind* found = std::find_if(std::begin(kKinds), std::end(kKinds), [&](const Kind& one) { return one.kind == kind; });
  return found == std::end(kKinds) ? nullptr : found;
}

void Piece(const Arguments& a, int64_t piece, Scratch& scratch) {
  for (const Matrix& m : a.matrices) {
    const int64_t begin = std::max<int64_t>(piece * a.width - m.first, 0), end = std::min((piece + 1) * a.width - m.first, m.outputs);
    if (begin < end) Find(m.kind)->outputs(a, m, begin, end, scratch);
  }
}

ffi::Error Multiply(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x, ffi::RemainingArgs of_matrices, ffi::RemainingRets of_results,
                    ffi::Span<const int64_t> kinds) {
  const Shape of_x = x.dimensions();
  if (of_x.size() != 2 || !of_matrices.size() || of_matrices.size() != of_results.size() || of_matrices.size() != kinds.size())
    return ffi::Error::InvalidArgument("block_product: x must have 2 axes, and each matrix a result and a kind; got " + Text(of_x) +
                                       ", " + std::to_string(of_matrices.size()) + ", " + std::to_string(of_results.size()) + " and " +
                                       std::to_string(kinds.size()));
  Arguments a = {x.typed_data(), {}, of_x[0], of_x[1], 0, 0};
  int64_t all = 0;
  for (size_t i = 0; i < of_matrices.size(); ++i) {
    auto matrix = of_matrices.get<ffi::Buffer<ffi::U8>>(i);
    auto result = of_results.get<ffi::Buffer<ffi::F32>>(i);
    if (!matrix.has_value()) return matrix.error();
    if (!result.has_value()) return result.error();
    const Shape shape = matrix->dimensions();
    const Kind* kind = Find(kinds[i]);
    if (!kind || a.inputs % kind->weights)
      return ffi::Error::InvalidArgument("block_product: no type " + std::to_string(kinds[i]) + " of blocks for " +
                                         std::to_string(a.inputs) + " inputs");
    const int64_t outputs = shape.size() == 2 ? shape[0] : 0;
    std::string error;
    if (!Fits("a matrix", shape, {outputs, a.inputs / kind->weights * kind->bytes}, error) ||
        !Fits("its result", (*result)->dimensions(), {a.num_x, outputs}, error))
      return ffi::Error::InvalidArgument("block_product: " + error);
    a.matrices.push_back({matrix->typed_data(), (*result)->typed_data(), outputs, all, kinds[i]});
    all += outputs;
  }
  const int64_t work = all * a.inputs * std::max<int64_t>(kFewRows, a.num_x);  // decoding takes about as long as these rows do
  const int64_t threads = std::clamp<int64_t>(work / kTurn, 1, pool.num_threads()), pieces = threads > 1 ? 4 * threads : 1;
  a.width = std::max<int64_t>((all / pieces + kTileOutputs) / kTileOutputs * kTileOutputs, kTileOutputs);
  a.rows = (all + a.width - 1) / a.width;
  return ForEachRow<Arguments>(pool, "block_product", a, Piece);
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(BlockProduct, Multiply,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attr<ffi::Span<const int64_t>>("kinds"));
