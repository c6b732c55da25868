// The redundancy of keys on a CPU. The mean of all similarities is one product with the sum of the keys, as in plain XLA. The
// latest similar key of each key is looked for from the newest keys on, a tile at a time, by the keys that have found none yet:
// of a language model's keys, three quarters of all pairs are similar, so most end in the first tile.
//
// Only filled slots are read, and they are put side by side first, so a row's bits depend on nothing but its filled keys.

#include "../wide.h"

namespace {

constexpr int kKeys = kWide / 2;   // keys that look at a tile together
constexpr int kTile = 2 * kWide;   // keys of a tile, in the lanes of vectors
constexpr float kLeastNorm = 1e-8; // added to a norm, so that keys of length 0 are similar to nothing

struct Arguments {
  const float* key;       // [R, S, H]
  const bool* is_filled;  // [R, S]
  float* out;             // [R, S]
  int64_t rows, slots, size;
  float threshold;
  int64_t exempt;
  bool exempt_first;
};

float Dot(const float* a, const float* b, int64_t size) {
  Lanes sums = {};
  int64_t h = 0;
  for (; h + kLanes <= size; h += kLanes) sums = MultiplyAdd(*(const Lanes*)(a + h), *(const Lanes*)(b + h), sums);
  float sum = Sum(sums);
  for (; h < size; ++h) sum = std::fma(a[h], b[h], sum);
  return sum;
}

// The cosines of `kKeys` unit keys with a tile [H, kTile] of them. Each is added up in the order of the channels.
__attribute__((noinline)) void Compare(const float* const* units, const float* tile, int64_t size, float (*cosines)[kTile]) {
  Wide sums[kKeys][2] = {};
  for (int64_t h = 0; h < size; ++h) {
    const Wide low = *(const Wide*)(tile + h * kTile), high = *(const Wide*)(tile + h * kTile + kWide);
#pragma GCC unroll 8
    for (int i = 0; i < kKeys; ++i) {
      const Wide number = units[i][h] - Wide{};
      sums[i][0] = MultiplyAdd(number, low, sums[i][0]);
      sums[i][1] = MultiplyAdd(number, high, sums[i][1]);
    }
  }
  std::memcpy(cosines, sums, sizeof(sums));
}

// Takes the latest similar keys of each key off their totals.
void TakeOff(const Arguments& a, const std::vector<float>& units, const std::vector<float>& tiles, bool has_first,
             std::vector<float>& totals) {
  const int64_t count = totals.size();
  std::vector<int64_t> searching(count), found(count);
  for (int64_t s = 0; s < count; ++s) searching[s] = s;
  float cosines[kKeys][kTile];
  for (int64_t begin = (count - 1) / kTile * kTile; begin >= 0 && !searching.empty(); begin -= kTile) {
    const int lanes = std::min<int64_t>(kTile, count - begin);
    size_t left = 0;
    for (size_t first = 0; first < searching.size(); first += kKeys) {
      int64_t keys[kKeys];
      const float* of_keys[kKeys];
      for (int i = 0; i < kKeys; ++i) {
        keys[i] = searching[std::min(first + i, searching.size() - 1)];
        of_keys[i] = units.data() + keys[i] * a.size;
      }
      Compare(of_keys, tiles.data() + begin * a.size, a.size, cosines);
      for (int i = 0; i < kKeys && first + i < searching.size(); ++i) {
        bool is_any = false;
        for (int lane = 0; lane < lanes; ++lane) is_any |= cosines[i][lane] > a.threshold;
        for (int lane = lanes - 1; is_any && lane >= 0 && found[keys[i]] < a.exempt; --lane)
          if (cosines[i][lane] > a.threshold && begin + lane != keys[i]) totals[begin + lane] -= cosines[i][lane], ++found[keys[i]];
        if (found[keys[i]] < a.exempt) searching[left++] = keys[i];  // a place that has been read
      }
    }
    searching.resize(left);
  }
  for (const int64_t key : searching)
    if (a.exempt_first && has_first && key && !found[key]) totals[0] -= Dot(units.data() + key * a.size, units.data(), a.size);
}

void RedundancyOfRow(const Arguments& a, int64_t row, Scratch& scratch) {
  const float* key = a.key + row * a.slots * a.size;
  const bool* is_filled = a.is_filled + row * a.slots;
  std::vector<int64_t> slots;
  for (int64_t slot = 0; slot < a.slots; ++slot)
    if (is_filled[slot]) slots.push_back(slot);
  const int64_t count = slots.size();

  std::vector<float>&units = scratch.logits, &tiles = scratch.page, sum(a.size), totals(count);
  units.resize(count * a.size);
  tiles.resize((count + kTile - 1) / kTile * kTile * a.size);
  for (int64_t s = 0; s < count; ++s) {
    const float* of_slot = key + slots[s] * a.size;
    float *unit = units.data() + s * a.size, *lane = tiles.data() + s / kTile * kTile * a.size + s % kTile;
    const float norm = std::sqrt(Dot(of_slot, of_slot, a.size)) + kLeastNorm;
    for (int64_t h = 0; h < a.size; ++h) {
      unit[h] = of_slot[h] / norm;
      sum[h] += unit[h];
      lane[h * kTile] = unit[h];
    }
  }
  for (int64_t s = 0; s < count; ++s) {
    const float* unit = units.data() + s * a.size;
    totals[s] = Dot(unit, sum.data(), a.size) - Dot(unit, unit, a.size);
  }
  if (a.exempt && count) TakeOff(a, units, tiles, !slots[0], totals);
  float* out = a.out + row * a.slots;
  std::fill(out, out + a.slots, 0.0f);
  for (int64_t s = 0; s < count; ++s) out[slots[s]] = totals[s] / count;
}

ffi::Error RedundancyOfRows(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> key, ffi::Buffer<ffi::PRED> is_filled,
                            ffi::ResultBuffer<ffi::F32> out, float threshold, int64_t exempt, bool exempt_first) {
  const Shape shape = key.dimensions();
  if (shape.size() != 3) return ffi::Error::InvalidArgument("key_redundancy: keys must have 3 axes; got " + Text(shape));
  std::string error;
  if (!Fits("is_filled", is_filled.dimensions(), {shape[0], shape[1]}, error) ||
      !Fits("its result", out->dimensions(), {shape[0], shape[1]}, error))
    return ffi::Error::InvalidArgument("key_redundancy: " + error);
  const Arguments a = {key.typed_data(), is_filled.typed_data(), out->typed_data(), shape[0],    shape[1],
                       shape[2],         threshold,              exempt,            exempt_first};
  return ForEachRow<Arguments>(pool, "key_redundancy", a, RedundancyOfRow);
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(KeyRedundancy, RedundancyOfRows,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::PRED>>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Attr<float>("threshold")
                                  .Attr<int64_t>("exempt")
                                  .Attr<bool>("exempt_first"));
