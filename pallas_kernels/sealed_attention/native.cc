// Decode attention on a CPU over sealed pages, whose codes become numbers in registers alone.
//
// A scale of a channel multiplies the queries of a page, or a page's sums of values, and one of a slot a logit or a share; zero
// points add one number for each page and query head, or each page's sums. See `pallas_kernels/sealed.py` for the records.

#include "../native.h"

namespace {

typedef uint32_t Words __attribute__((vector_size(4 * kLanes)));

struct Arguments {
  const float* query;        // [R, G, H]
  const uint8_t* key;        // [P, page, H * bits / 8]; byte i has the codes of channels i, i + H * bits / 8 and so on
  const uint8_t* value;      // likewise
  const uint16_t* scales;    // [P, 3 * (H + page)], float16; see `ScalesOf`
  const int32_t* table;      // [R, MP]
  const int32_t* num_pages;  // [R]
  float* out;                // [R, G, H]
  float* log_total;          // [R, G]
  int64_t rows, group, size, page, max_pages, pages_of_pool;
};

// Bytes 0 to 3 in each of the first four words, and bytes 4 to 7 in each of the others: a word is moved to the right by the place
// of its own byte, which takes no conversion of bytes.
inline Words ReadBytes(const uint8_t* from) {
  uint32_t w[2];
  std::memcpy(w, from, sizeof(w));
  return Words{w[0], w[0], w[0], w[0], w[1], w[1], w[1], w[1]};
}

// The codes of one part of `kLanes` bytes: those of neighbouring channels.
template <int Bits>
inline Lanes Codes(Words bytes, int part) {
  const Words places = {0, 8, 16, 24, 0, 8, 16, 24};
  return __builtin_convertvector((IntLanes)((bytes >> (places + (uint32_t)(part * Bits))) & ((1u << Bits) - 1)), Lanes);
}

// Products of a page's codes of keys with the queries of `Heads` heads, times each slot's scale; `added` is added before.
template <int Bits, int Heads>
void Logits(const uint8_t* code, int64_t slots, const float* query, int64_t size, const float* added, const float* of_slot,
            float* to, int64_t stride) {
  constexpr int kParts = 8 / Bits;
  const int64_t width = size / kParts;
  for (int64_t slot = 0; slot < slots; ++slot, code += width) {
    Lanes sums[Heads] = {};
    for (int64_t c = 0; c < width; c += kLanes) {
      const Words bytes = ReadBytes(code + c);
      for (int part = 0; part < kParts; ++part) {
        const Lanes numbers = Codes<Bits>(bytes, part);
        for (int g = 0; g < Heads; ++g) sums[g] += numbers * *(const Lanes*)(query + g * size + part * width + c);
      }
    }
    for (int g = 0; g < Heads; ++g) to[g * stride + slot] = (Sum(sums[g]) + added[g]) * of_slot[slot];
  }
}

// Adds a page's values, each times the share of its slot, to the outputs of `Heads` heads; `added` is added to each sum before
// its channel's scale.
template <int Bits, int Heads>
void AddValues(const uint8_t* code, int64_t slots, const float* share, const float* added, const float* of_channel, int64_t size,
               float* out) {
  constexpr int kParts = 8 / Bits;
  const int64_t width = size / kParts;
  for (int64_t c = 0; c < width; c += kLanes) {
    Lanes sums[Heads][kParts] = {};
    for (int64_t slot = 0; slot < slots; ++slot) {
      const Words bytes = ReadBytes(code + slot * width + c);
      for (int part = 0; part < kParts; ++part) {
        const Lanes numbers = Codes<Bits>(bytes, part);
        for (int g = 0; g < Heads; ++g) sums[g][part] += numbers * share[g * slots + slot];
      }
    }
    for (int g = 0; g < Heads; ++g)
      for (int part = 0; part < kParts; ++part) {
        const int64_t channel = part * width + c;
        *(Lanes*)(out + g * size + channel) += (sums[g][part] + added[g]) * *(const Lanes*)(of_channel + channel);
      }
  }
}

// Calls `run` with a number of heads that it has a form for, at most `Most`, until all heads of the group had their turn.
template <int Most, typename Run>
inline void ForHeads(int64_t group, Run&& run, int64_t g = 0) {
  for (; g + Most <= group; g += Most) run(std::integral_constant<int, Most>(), g);
  if constexpr (Most > 1) ForHeads<Most / 2>(group, run, g);
}

// Visits the pages of a row, with the number of the first slot. `fetch` is called with the page after it, which may be anywhere.
template <typename Fetch, typename Visit>
inline void ForPages(const Arguments& a, int64_t row, int64_t count, Fetch&& fetch, Visit&& visit) {
  const int32_t* table = a.table + row * a.max_pages;
  int64_t next = count ? InPool(table[0], a.pages_of_pool) : 0;
  for (int64_t entry = 0; entry < count; ++entry) {
    const int64_t now = next;
    if (entry + 1 < count) fetch(next = InPool(table[entry + 1], a.pages_of_pool));
    visit(now, entry * a.page);
  }
}

// The scales of a page's tiles: of rows, steps with zero points behind them, and of columns.
struct ScalesOf {
  const uint16_t *key_rows, *key_columns, *value_rows, *value_columns;

  ScalesOf(const Arguments& a, int64_t id) : key_rows(a.scales + id * 3 * (a.size + a.page)) {
    key_columns = key_rows + 2 * a.size;
    value_rows = key_columns + a.page;
    value_columns = value_rows + 2 * a.page;
  }
};

// The numbers of a page that its codes are multiplied with.
struct Factors {
  float *step, *zero;  // of the tile's rows: a key's channels, a value's slots
  float* of_column;    // the scales of its columns
  float* scaled;       // of each head: its queries or shares, times steps
  float* added;        // of each head: the sum of its queries or shares, times zero points
};

// Fills them from a page's scales and the numbers of each head, `stride` from one head to the next.
void Multiply(const uint16_t* of_row, int64_t rows, const uint16_t* of_column, int64_t columns, const float* numbers, int64_t stride,
              int64_t group, const Factors& to) {
  FromHalf(of_row, 2 * rows, to.step);  // zero points stand behind steps
  FromHalf(of_column, columns, to.of_column);
  for (int64_t g = 0; g < group; ++g) {
    Lanes sums = {};
    for (int64_t i = 0; i < rows; i += kLanes) {
      const Lanes mine = *(const Lanes*)(numbers + g * stride + i);
      *(Lanes*)(to.scaled + g * rows + i) = mine * *(const Lanes*)(to.step + i);
      sums += mine * *(const Lanes*)(to.zero + i);
    }
    to.added[g] = Sum(sums);
  }
}

// Factors of tiles of so many rows and columns, in a thread's memory.
Factors FactorsIn(std::vector<float>& memory, int64_t rows, int64_t columns, int64_t group) {
  memory.resize(2 * rows + columns + group * (rows + 1));
  float *step = memory.data(), *of_column = step + 2 * rows, *scaled = of_column + columns;
  return {step, step + rows, of_column, scaled, scaled + group * rows};
}

// Attends for a row: the logits of all of its pages, their softmax, and the sums of values.
template <int KeyBits, int ValueBits>
void AttendRecords(const Arguments& a, int64_t row, Scratch& memory) {
  const int64_t size = a.size, page = a.page, group = a.group;
  const int64_t count = std::clamp<int64_t>(a.num_pages[row], 0, a.max_pages), filled = count * page;
  const int64_t key_bytes = page * size * KeyBits / 8, value_bytes = page * size * ValueBits / 8;  // of a page
  const float scale = 1.0f / std::sqrt((float)size);
  const float* query = a.query + row * group * size;
  memory.logits.resize(group * filled);
  float* logits = memory.logits.data();

  Factors of = FactorsIn(memory.page, size, page, group);
  const auto fetch_key = [&](int64_t id) {
    Prefetch(a.key + id * key_bytes, key_bytes);
    Prefetch(ScalesOf(a, id).key_rows, (2 * size + page) * sizeof(uint16_t));
  };
  ForPages(a, row, count, fetch_key, [&](int64_t id, int64_t first) {
    const ScalesOf scales(a, id);
    Multiply(scales.key_rows, size, scales.key_columns, page, query, size, group, of);
    for (int64_t slot = 0; slot < page; ++slot) of.of_column[slot] *= scale;
    ForHeads<4>(group, [&](auto heads, int64_t g) {
      Logits<KeyBits, heads>(a.key + id * key_bytes, page, of.scaled + g * size, size, of.added + g, of.of_column,
                             logits + g * filled + first, filled);
    });
  });
  for (int64_t g = 0; g < group; ++g) a.log_total[row * group + g] = Softmax(logits + g * filled, filled);

  float* out = a.out + row * group * size;
  std::fill(out, out + group * size, 0.0f);
  of = FactorsIn(memory.page, page, size, group);
  const auto fetch_value = [&](int64_t id) {
    Prefetch(a.value + id * value_bytes, value_bytes);
    Prefetch(ScalesOf(a, id).value_rows, (2 * page + size) * sizeof(uint16_t));
  };
  ForPages(a, row, count, fetch_value, [&](int64_t id, int64_t first) {
    const ScalesOf scales(a, id);
    Multiply(scales.value_rows, page, scales.value_columns, size, logits + first, filled, group, of);
    ForHeads<ValueBits>(group, [&](auto heads, int64_t g) {  // with more, sums would not stay in registers
      AddValues<ValueBits, heads>(a.value + id * value_bytes, page, of.scaled + g * page, of.added + g, of.of_column, size,
                                  out + g * size);
    });
  });
}

ffi::Error Attend(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> query, ffi::Buffer<ffi::U8> key, ffi::Buffer<ffi::U8> value,
                  ffi::Buffer<ffi::U16> scales, ffi::Buffer<ffi::S32> table, ffi::Buffer<ffi::S32> num_pages,
                  ffi::ResultBuffer<ffi::F32> out, ffi::ResultBuffer<ffi::F32> log_total) {
  const Shape of_query = query.dimensions(), of_key = key.dimensions(), of_value = value.dimensions(), of_table = table.dimensions();
  if (of_query.size() != 3 || of_key.size() != 3 || of_value.size() != 3 || of_table.size() != 2)
    return ffi::Error::InvalidArgument("sealed_attention: query, keys, values and page table must have 3, 3, 3 and 2 axes; got " +
                                       Text(of_query) + ", " + Text(of_key) + ", " + Text(of_value) + " and " + Text(of_table));
  const int64_t rows = of_query[0], group = of_query[1], size = of_query[2], pages = of_key[0], page = of_key[1];
  const auto are = [&](int64_t key_bits, int64_t value_bits) { return of_key[2] * 8 == size * key_bits && of_value[2] * 8 == size * value_bits; };
  const AttendRow<Arguments> attend = are(4, 2) ? AttendRecords<4, 2> : are(4, 4) ? AttendRecords<4, 4> : nullptr;
  std::string error;
  if (!attend) error = "codes of keys must have 4 bits, and those of values 2 or 4; got " + Text(of_key) + " and " + Text(of_value) + " for heads of " + std::to_string(size);
  if (of_value[2] % kLanes || page % kLanes)
    error = "the bytes of a value's codes and the slots of a page must be multiples of " + std::to_string(kLanes) + "; got " +
            std::to_string(of_value[2]) + " and " + std::to_string(page);
  if (pages < 1) error = "there must be a page; got " + Text(of_key);
  if (!error.empty() || !Fits("values", of_value, {pages, page, of_value[2]}, error) ||
      !Fits("scales", scales.dimensions(), {pages, 2, 3 * (size + page) / 2}, error) ||
      !Fits("page table", of_table, {rows, of_table[1]}, error) || !Fits("page counts", num_pages.dimensions(), {rows}, error) ||
      !Fits("the output", out->dimensions(), {rows, group, size}, error) ||
      !Fits("the log-totals", log_total->dimensions(), {rows, group}, error))
    return ffi::Error::InvalidArgument("sealed_attention: " + error);
  const Arguments arguments = {query.typed_data(), key.typed_data(), value.typed_data(), scales.typed_data(),
                               table.typed_data(), num_pages.typed_data(), out->typed_data(), log_total->typed_data(),
                               rows, group, size, page, of_table[1], pages};
  return ForEachRow<Arguments>(pool, "sealed_attention", arguments, attend);
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(SealedAttention, Attend,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::U8>>()
                                  .Arg<ffi::Buffer<ffi::U8>>()
                                  .Arg<ffi::Buffer<ffi::U16>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>());
