// Denormal numbers as zeros while kernels compute.
//
// A processor takes a hundred cycles and more for an operation with one, and VDPBF16PS, VCVTNEPS2BF16
// and AMX take them for 0 anyway: weights whose scales are next to 0 would make a layer several times
// slower.  The mode belongs to a thread, and what PyTorch computes on the same thread keeps its own.

#pragma once

#include <atomic>
#include <cstdint>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace ray_hetero {

// This thread's operations take denormal operands for 0, and have 0 for denormal results, while one
// of these lives; the thread's former mode comes back behind it.
class DenormalsAreZero {
 public:
  DenormalsAreZero() : before_(mode()) {
    if ((before_ & kZeros) != kZeros) set_mode(before_ | kZeros);
  }
  ~DenormalsAreZero() {
    if ((before_ & kZeros) != kZeros) set_mode(before_);
  }
  DenormalsAreZero(const DenormalsAreZero&) = delete;
  DenormalsAreZero& operator=(const DenormalsAreZero&) = delete;

 private:
  // The compiler does not know that operations depend on the mode, but moves no load over a fence.
#if defined(__x86_64__)
  using Mode = std::uint32_t;
  static constexpr Mode kZeros = 0x8040;  // MXCSR: FZ of results, DAZ of operands
  static Mode mode() { return _mm_getcsr(); }
  static void set_mode(Mode mode) {
    std::atomic_signal_fence(std::memory_order_seq_cst);
    _mm_setcsr(mode);
    std::atomic_signal_fence(std::memory_order_seq_cst);
  }
#elif defined(__aarch64__)
  using Mode = std::uint64_t;
  static constexpr Mode kZeros = 1u << 24;  // FPCR: FZ
  static Mode mode() {
    Mode mode;
    asm volatile("mrs %0, fpcr" : "=r"(mode));
    return mode;
  }
  static void set_mode(Mode mode) { asm volatile("msr fpcr, %0" : : "r"(mode) : "memory"); }
#else
  using Mode = std::uint32_t;
  static constexpr Mode kZeros = 0;
  static Mode mode() { return 0; }
  static void set_mode(Mode) {}
#endif

  const Mode before_;
};

}  // namespace ray_hetero
