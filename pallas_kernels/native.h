// What the decode kernels of a CPU share: vectors, the softmax of a row, page ids, shapes, and the threads of a call.
//
// One thread computes a row, in a fixed order, so the row's bits do not depend on its neighbours, its place in the batch or the
// width of the table. Letters: R rows, G query heads of a KV head, S slots, H head size.
//
// Nothing outside of the arrays is read or written, whatever they hold: shapes are checked once a call, lengths are limited to
// the table's slots, and page ids to the pool as the reference has them (one below 0 counts from the end, then the nearest).

#ifndef PALLAS_KERNELS_NATIVE_H_
#define PALLAS_KERNELS_NATIVE_H_

#include <algorithm>
#include <atomic>
#include <cmath>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <mutex>
#include <new>
#include <string>
#include <type_traits>
#include <vector>

#include "xla/ffi/api/ffi.h"

#if defined(__FMA__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace ffi = xla::ffi;

namespace {

constexpr int kLanes = 8;
typedef float Lanes __attribute__((vector_size(4 * kLanes), aligned(4), may_alias));
typedef float Quad __attribute__((vector_size(16)));
typedef int32_t IntLanes __attribute__((vector_size(4 * kLanes)));
constexpr float kNone = -std::numeric_limits<float>::infinity();

inline float Sum(Lanes x) {
  Quad halves[2];
  std::memcpy(halves, &x, sizeof(x));
  const Quad four = halves[0] + halves[1], two = four + Quad{four[2], four[3], four[2], four[3]};
  return two[0] + two[1];
}

// a * b + sum, rounded once where the processor can. Compilers decide anew in each loop whether they round the product too (for
// some processors they do in a loop with one sum, and not in one with several), and then bits depend on the number of rows.
inline Lanes MultiplyAdd(Lanes a, Lanes b, Lanes sum) {
#if defined(__FMA__)
  return (Lanes)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)sum);
#elif defined(__aarch64__)
  float32x4_t of_a[2], of_b[2], of_sum[2];
  std::memcpy(of_a, &a, sizeof(a));
  std::memcpy(of_b, &b, sizeof(b));
  std::memcpy(of_sum, &sum, sizeof(sum));
  for (int i = 0; i < 2; ++i) of_sum[i] = vfmaq_f32(of_sum[i], of_a[i], of_b[i]);
  std::memcpy(&sum, of_sum, sizeof(sum));
  return sum;
#else
  return a * b + sum;
#endif
}

// e to the power x for x <= 0, to two units in the last place; 0 below -87, NaN for NaN.
inline Lanes Exp(Lanes x) {
  const Lanes is_small = (Lanes)(x < -87.0f);
  Lanes bounded = x < -87.0f ? Lanes{} - 87.0f : x;
  Lanes shifted = bounded * 1.44269504f + 12582912.0f;  // 1.5 * 2^23: the sum's low bits are the nearest integer
  Lanes whole = shifted - 12582912.0f;
  Lanes rest = (bounded - whole * 0.693359375f) + whole * 2.12194440e-4f;
  Lanes sum = rest * 1.9875691500e-4f + 1.3981999507e-3f;
  sum = sum * rest + 8.3334519073e-3f;
  sum = sum * rest + 4.1665795894e-2f;
  sum = sum * rest + 1.6666665459e-1f;
  sum = sum * rest + 5.0000001201e-1f;
  sum = sum * rest * rest + rest + 1.0f;
  IntLanes bits = ((IntLanes)shifted - 0x4B400000 + 127) << 23;
  Lanes power = sum * (Lanes)bits;
  return (IntLanes)is_small != 0 ? Lanes{} : power;
}

// A page of the pool for any id.
inline int64_t InPool(int64_t id, int64_t num_pages) {
  return std::clamp<int64_t>(id < 0 ? id + num_pages : id, 0, num_pages - 1);
}

// Turns logits into shares of the softmax, whose denominator's logarithm it returns.
float Softmax(float* logits, int64_t padded) {
  float peak = kNone;
  for (int64_t slot = 0; slot < padded; ++slot) peak = logits[slot] > peak ? logits[slot] : peak;
  const float base = peak == kNone ? 0.0f : peak;
  Lanes sums = {};
  for (int64_t slot = 0; slot < padded; slot += kLanes) {
    Lanes* of_slots = (Lanes*)(logits + slot);
    *of_slots = Exp(*of_slots - base);
    sums += *of_slots;
  }
  const float total = Sum(sums), share = total == 0 ? 0.0f : 1.0f / total;
  for (int64_t slot = 0; slot < padded; slot += kLanes) *(Lanes*)(logits + slot) *= share;
  return std::log(total) + base;
}

// Float16s as floats: their bits move to a float's place, whose exponents count from another number.
inline void FromHalf(const uint16_t* __restrict half, int64_t count, float* __restrict to) {
  for (int64_t i = 0; i < count; ++i) {
    const uint32_t size = half[i] & 0x7FFFu, moved = size << 13;
    const uint32_t special = size >= 0x7C00 ? 0x7F800000u : 0u;  // infinity or NaN
    float number;
    std::memcpy(&number, &moved, 4);
    number *= 5.192296858534828e33f;  // 2^112
    uint32_t bits;
    std::memcpy(&bits, &number, 4);
    bits |= special | (half[i] & 0x8000u) << 16;
    std::memcpy(to + i, &bits, 4);
  }
}

inline void Prefetch(const void* from, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch((const char*)from + i);
}

// Memory of a thread, which each of its rows overwrites.
struct Scratch {
  std::vector<float> logits, page;
};

template <typename Arguments>
using AttendRow = void (*)(const Arguments&, int64_t row, Scratch&);

// The state of one call that its threads share; it lives until the last thread has looked for work.
template <typename Arguments>
struct Work {
  Arguments arguments;
  AttendRow<Arguments> attend;
  std::atomic<int64_t> next{0}, done{0};
  std::atomic<bool> is_out_of_memory{false};
  std::mutex mutex;
  std::condition_variable is_done;

  void Run() {
    Scratch scratch;
    int64_t row, finished = 0;
    while ((row = next.fetch_add(1)) < arguments.rows) {
      try {
        attend(arguments, row, scratch);
      } catch (const std::bad_alloc&) {  // nobody would catch it in a thread of the pool
        is_out_of_memory = true;
      }
      ++finished;
    }
    if (finished && done.fetch_add(finished) + finished == arguments.rows) {
      std::lock_guard<std::mutex> lock(mutex);
      is_done.notify_all();
    }
  }
};

// Attends for all rows of the arguments, on the threads of XLA's pool and this one.
template <typename Arguments>
ffi::Error ForEachRow(ffi::ThreadPool pool, const std::string& kernel, const Arguments& arguments, AttendRow<Arguments> attend) {
  auto work = std::make_shared<Work<Arguments>>();
  work->arguments = arguments;
  work->attend = attend;
  const int64_t helpers = std::min<int64_t>(pool.num_threads(), arguments.rows) - 1;
  for (int64_t i = 0; i < helpers; ++i) pool.Schedule([work] { work->Run(); });
  work->Run();  // no thread waits for work that has not begun, so a pool with no free thread is enough
  std::unique_lock<std::mutex> lock(work->mutex);
  work->is_done.wait(lock, [&] { return work->done.load() == arguments.rows; });
  if (work->is_out_of_memory) return ffi::Error(ffi::ErrorCode::kResourceExhausted, kernel + ": out of memory");
  return ffi::Error::Success();
}

using Shape = ffi::Span<const int64_t>;

std::string Text(Shape shape) {
  std::string text;
  for (const int64_t size : shape) text += (text.empty() ? "" : ", ") + std::to_string(size);
  return "[" + text + "]";
}

// Whether an array has this shape; if not, the error says so.
bool Fits(const char* name, Shape shape, std::vector<int64_t> wanted, std::string& error) {
  const bool fits = shape == Shape(wanted);
  if (!fits) error = std::string(name) + " must have the shape " + Text(Shape(wanted)) + "; got " + Text(shape);
  return fits;
}

}  // namespace

#endif  // PALLAS_KERNELS_NATIVE_H_
