// Decode attention on a CPU that reads pages in place: XLA gathers them first, which takes most of its time.
//
// The pool holds floats, codes of 8 bits (whole numbers or floats) with a scale for each slot's key and value, or codes of 4 bits with one for each group
// of channels. A page of codes becomes floats in a thread's own memory, which stays in the processor's cache, one page at a time,
// so a row's bits are those of a pool that holds these floats.

#include "../native.h"

namespace {

constexpr int64_t kGroup = 32;  // channels with a scale of their own, of codes of 4 bits
constexpr int64_t kRun = 16;    // bytes of two codes that are read at once; neither half of them crosses the border of a group

struct Arguments {
  const float* query;       // [R, G, H]
  const void* kv;           // [P, 2, page, H], float or codes of 8 bits, or [P, 2, page, H / 2] with two codes of 4 bits in each
  const void* kv_scale;     // null for float; [P, 2, page] float of codes of 8 bits; [P, 2, page, H / 32] float16 of 4
  const int32_t* table;     // [R, MP]
  const int32_t* length;    // [R], or [R, T]: slots that the queries of each place read, most those of the last; query g is of place g / (G / T)
  const float* log_weight;  // [R, MP * page], or null
  float* out;               // [R, G, H]
  float* log_total;         // [R, G]
  float* logits;            // [R, G, MP * page], or null
  int64_t rows, group, size, page, max_pages, num_pages, places;
};

// Scaled products of neighbouring keys with `Heads` of the group's queries.
template <int Heads>
void Products(const float* key, int64_t slots, const float* query, int64_t size, float scale, float* to, int64_t stride) {
  for (int64_t slot = 0; slot < slots; ++slot, key += size) {
    Lanes sums[Heads] = {};
    for (int64_t h = 0; h < size; h += kLanes) {
      const Lanes of_key = *(const Lanes*)(key + h);
      for (int g = 0; g < Heads; ++g) sums[g] = MultiplyAdd(of_key, *(const Lanes*)(query + g * size + h), sums[g]);
    }
    for (int g = 0; g < Heads; ++g) to[g * stride + slot] = Sum(sums[g]) * scale;
  }
}

// Adds neighbouring values, each times its share, four at a time.
void AddValues(const float* value, int64_t slots, const float* share, int64_t size, float* out) {
  int64_t slot = 0;
  for (; slot + 4 <= slots; slot += 4, value += 4 * size) {
    const float a = share[slot], b = share[slot + 1], c = share[slot + 2], d = share[slot + 3];
    for (int64_t h = 0; h < size; h += kLanes) {
      const float* at = value + h;
      const Lanes low = *(const Lanes*)at * a + *(const Lanes*)(at + size) * b;
      const Lanes high = *(const Lanes*)(at + 2 * size) * c + *(const Lanes*)(at + 3 * size) * d;
      *(Lanes*)(out + h) += low + high;
    }
  }
  for (; slot < slots; ++slot, value += size)
    for (int64_t h = 0; h < size; h += kLanes) *(Lanes*)(out + h) += *(const Lanes*)(value + h) * share[slot];
}

// How a pool stores vectors: as an array of `Number`s, with an array of `Scale`s of the same slots.
struct Floats {
  typedef float Number;
  typedef float Scale;
  static int64_t NumbersOf(int64_t size) { return size; }
  static int64_t ScalesOf(int64_t) { return 0; }
  static const float* Read(const float* numbers, const float*, int64_t, int64_t, float*) { return numbers; }
};

struct Codes8 {
  typedef int8_t Number;
  typedef float Scale;
  static int64_t NumbersOf(int64_t size) { return size; }
  static int64_t ScalesOf(int64_t) { return 1; }
  static const float* Read(const int8_t* codes, const float* scale, int64_t slots, int64_t size, float* to) {
    for (int64_t slot = 0; slot < slots; ++slot, codes += size) {
      const float of_slot = scale[slot];
      for (int64_t h = 0; h < size; ++h) to[slot * size + h] = codes[h] * of_slot;
    }
    return to;
  }
};

// A float of 8 bits, 4 of them its exponent's, as a float: its bits move to a float's place, whose exponents count from another
// number. Numbers below the smallest normal one are moved one exponent up, with a first digit that is taken off again: a
// processor may be told to take floats that are not normal for 0. The code of NaN is 480, and the scale of its vector is NaN.
inline float FromFloat8(uint8_t code) {
  const uint32_t moved = (uint32_t)(code & 0x7F) << 20;
  const bool is_small = moved < 1u << 23;
  uint32_t bits = moved + (120u << 23) + (is_small ? 1u << 23 : 0u);
  float number;
  std::memcpy(&number, &bits, 4);
  number -= is_small ? 0.015625f : 0.0f;  // 2^-6
  std::memcpy(&bits, &number, 4);
  bits |= (uint32_t)(code & 0x80) << 24;
  std::memcpy(&number, &bits, 4);
  return number;
}

struct CodesFloat8 {
  typedef uint8_t Number;
  typedef float Scale;
  static int64_t NumbersOf(int64_t size) { return size; }
  static int64_t ScalesOf(int64_t) { return 1; }
  static const float* Read(const uint8_t* __restrict codes, const float* scale, int64_t slots, int64_t size, float* __restrict to) {
    for (int64_t slot = 0; slot < slots; ++slot, codes += size) {
      const float of_slot = scale[slot];
      for (int64_t h = 0; h < size; ++h) to[slot * size + h] = FromFloat8(codes[h]) * of_slot;
    }
    return to;
  }
};

// Numbers of the low and of the high halves of `kRun` bytes.
inline void Unpack(const uint8_t* __restrict codes, float low, float high, float* __restrict to, float* __restrict to_high) {
  for (int i = 0; i < kRun; ++i) to[i] = ((codes[i] & 15) - 8) * low;
  for (int i = 0; i < kRun; ++i) to_high[i] = ((codes[i] >> 4) - 8) * high;
}

// Byte c has the code of channel c in its low half and that of channel c + H / 2 in its high half, each plus 8.
struct Codes4 {
  typedef uint8_t Number;
  typedef uint16_t Scale;
  static int64_t NumbersOf(int64_t size) { return size / 2; }
  static int64_t ScalesOf(int64_t size) { return size / kGroup; }
  static const float* Read(const uint8_t* codes, const uint16_t* scale, int64_t slots, int64_t size, float* to) {
    const int64_t half = size / 2, groups = ScalesOf(size);
    float* of_group = to + slots * size;
    FromHalf(scale, slots * groups, of_group);
    for (int64_t slot = 0; slot < slots; ++slot, codes += half, of_group += groups) {
      float* of_slot = to + slot * size;
      for (int64_t c = 0; c < half; c += kRun)
        Unpack(codes + c, of_group[c / kGroup], of_group[(c + half) / kGroup], of_slot + c, of_slot + half + c);
    }
    return to;
  }
};

template <typename Pool>
void AttendPages(const Arguments& a, int64_t row, Scratch& memory) {
  const int64_t slots = a.max_pages * a.page;
  const auto own_of = [&](int64_t g) {  // the slots that a query reads
    return std::clamp<int64_t>(a.length[row * a.places + g / (a.group / a.places)], 0, slots);
  };
  const int64_t filled = a.group ? own_of(a.group - 1) : 0;
  const int64_t stride = (filled + kLanes - 1) / kLanes * kLanes;
  const float scale = 1.0f / std::sqrt((float)a.size);
  const float* query = a.query + row * a.group * a.size;
  const float* weight = a.log_weight ? a.log_weight + row * slots : nullptr;
  std::vector<float>& scratch = memory.logits;
  scratch.resize(a.group * stride);
  if (a.kv_scale) memory.page.resize(a.page * (a.size + Pool::ScalesOf(a.size)));  // of a page, and its scales as floats
  const auto each_page = [&](int64_t half, auto&& visit) {  // visits keys (0) or values (1) by page, first slot and count
    const int32_t* table = a.table + row * a.max_pages;
    const auto at = [&](int64_t entry) { return (InPool(table[entry], a.num_pages) * 2 + half) * a.page; };  // its first slot
    const int64_t numbers = Pool::NumbersOf(a.size), scales = Pool::ScalesOf(a.size);  // of a slot
    const auto* kv = (const typename Pool::Number*)a.kv;
    const auto* scale = (const typename Pool::Scale*)a.kv_scale;
    int64_t next = filled ? at(0) : 0;
    for (int64_t first = 0, entry = 0; first < filled; first += a.page, ++entry) {
      const int64_t now = next, count = std::min(a.page, filled - first);
      if (first + a.page < filled) {
        next = at(entry + 1);  // it may be anywhere
        Prefetch(kv + next * numbers, a.page * numbers * sizeof(*kv));
        Prefetch(scale + next * scales, a.page * scales * sizeof(*scale));
      }
      visit(Pool::Read(kv + now * numbers, scale + now * scales, count, a.size, memory.page.data()), first, count);
    }
  };
  each_page(0, [&](const float* key, int64_t first, int64_t count) {
    int64_t g = 0;
    const auto products = [&](auto heads, auto&& run) {
      for (; g + heads <= a.group; g += heads)
        run(key, count, query + g * a.size, a.size, scale, scratch.data() + g * stride + first, stride);
    };
    products(4, Products<4>);
    products(2, Products<2>);
    products(1, Products<1>);
  });
  for (int64_t g = 0; g < a.group; ++g) {
    float* mine = scratch.data() + g * stride;
    const int64_t own = std::min(own_of(g), filled), padded = (own + kLanes - 1) / kLanes * kLanes;
    for (int64_t slot = 0; weight && slot < own; ++slot)  // a vacant slot may hold anything
      mine[slot] = weight[slot] == kNone ? kNone : mine[slot] + weight[slot];
    std::fill(mine + own, mine + padded, kNone);
    if (a.logits) {
      float* row_logits = a.logits + (row * a.group + g) * slots;
      std::fill(std::copy(mine, mine + own, row_logits), row_logits + slots, kNone);
    }
    a.log_total[row * a.group + g] = Softmax(mine, padded);
  }
  float* out = a.out + row * a.group * a.size;
  std::fill(out, out + a.group * a.size, 0.0f);
  each_page(1, [&](const float* value, int64_t first, int64_t count) {
    for (int64_t begin = 0, end; begin < count; begin = end + 1) {  // the slots between two vacant ones
      for (end = begin; end < count && !(weight && weight[first + end] == kNone); ++end) {}
      for (int64_t g = 0; g < a.group; ++g) {  // a query's sums are those of a row that ends where it ends
        const int64_t until = std::min(end, own_of(g) - first);
        AddValues(value + begin * a.size, std::max<int64_t>(until - begin, 0), scratch.data() + g * stride + first + begin, a.size, out + g * a.size);
      }
    }
  });
}

ffi::Error Attend(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> query, ffi::AnyBuffer kv, ffi::AnyBuffer kv_scale,
                  ffi::Buffer<ffi::S32> table, ffi::Buffer<ffi::S32> length, ffi::Buffer<ffi::F32> log_weight, ffi::ResultBuffer<ffi::F32> out,
                  ffi::ResultBuffer<ffi::F32> log_total, ffi::ResultBuffer<ffi::F32> logits) {
  const Shape of_query = query.dimensions(), of_kv = kv.dimensions(), of_table = table.dimensions();
  if (of_query.size() != 3 || of_kv.size() != 4 || of_table.size() != 2)
    return ffi::Error::InvalidArgument("paged_attention: query, kv and page table must have 3, 4 and 2 axes; got " + Text(of_query) + ", " +
                                       Text(of_kv) + " and " + Text(of_table));
  const int64_t rows = of_query[0], group = of_query[1], size = of_query[2], page = of_kv[2], slots = of_table[1] * page;
  const Shape of_length = length.dimensions();
  const int64_t places = of_length.size() == 2 ? of_length[1] : 1;
  const std::vector<int64_t> lengths = of_length.size() == 2 ? std::vector<int64_t>{rows, places} : std::vector<int64_t>{rows};
  const bool is_weighted = log_weight.element_count(), has_logits = logits->element_count();
  const bool is_int8 = kv.element_type() == ffi::DataType::S8, is_uint8 = kv.element_type() == ffi::DataType::U8;
  const bool is_4 = is_uint8 && kv_scale.element_type() == ffi::DataType::U16, is_8 = is_int8 || (is_uint8 && !is_4);
  const int64_t numbers = is_4 ? Codes4::NumbersOf(size) : size;
  std::vector<int64_t> scales = {0};
  if (is_8) scales = {of_kv[0], 2, page};
  if (is_4) scales = {of_kv[0], 2, page, Codes4::ScalesOf(size)};
  std::string error;
  if (size % kLanes) error = "head size must be a multiple of " + std::to_string(kLanes) + "; got " + std::to_string(size);
  if (is_4 && size % kGroup)
    error = "the head size of codes of 4 bits must be a multiple of " + std::to_string(kGroup) + "; got " + std::to_string(size);
  if (!is_8 && !is_4 && kv.element_type() != ffi::DataType::F32) error = "kv must hold float32, int8, or uint8 of floats or of two codes of 4 bits";
  if (!is_4 && kv_scale.element_type() != ffi::DataType::F32) error = "scales must be float32, or uint16 of codes of 4 bits";
  if (of_kv[0] < 1) error = "kv must have a page; got " + Text(of_kv);
  if (places < 1 || group % places) error = "the places of lengths must divide the queries of a row; got " + Text(of_length);
  if (!error.empty() || !Fits("kv", of_kv, {of_kv[0], 2, page, numbers}, error) ||
      !Fits("scales", kv_scale.dimensions(), scales, error) ||
      !Fits("page table", of_table, {rows, of_table[1]}, error) || !Fits("lengths", of_length, lengths, error) ||
      !Fits("log-weights", log_weight.dimensions(), {rows, is_weighted ? slots : 0}, error) ||
      !Fits("the output", out->dimensions(), {rows, group, size}, error) ||
      !Fits("the log-totals", log_total->dimensions(), {rows, group}, error) ||
      !Fits("the logits", logits->dimensions(), {rows, group, has_logits ? slots : 0}, error))
    return ffi::Error::InvalidArgument("paged_attention: " + error);
  const Arguments arguments = {query.typed_data(), kv.untyped_data(), is_8 || is_4 ? kv_scale.untyped_data() : nullptr,
                               table.typed_data(), length.typed_data(), is_weighted ? log_weight.typed_data() : nullptr,
                               out->typed_data(), log_total->typed_data(), has_logits ? logits->typed_data() : nullptr,
                               rows, group, size, page, of_table[1], of_kv[0], places};
  const auto attend = is_int8 ? AttendPages<Codes8> : is_8 ? AttendPages<CodesFloat8> : is_4 ? AttendPages<Codes4> : AttendPages<Floats>;
  return ForEachRow<Arguments>(pool, "paged_attention", arguments, attend);
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(PagedAttention, Attend,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>());
