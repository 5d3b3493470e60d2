// What this processor has, and what the kernel and the user let this process use of it.

#pragma once

#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdlib>
#include <stdexcept>
#include <string>

namespace ray_hetero {

// Whether the environment lets this process use a set of instructions.  RAY_HETERO_MAX_CPU_ISA names
// the best one to use, as ONEDNN_MAX_CPU_ISA does for oneDNN; placement/host/instruction_sets.py
// reads it too.
//
// Throws std::invalid_argument if it names none that exists.
inline bool is_allowed(const std::string& asked) {
  const char* best = std::getenv("RAY_HETERO_MAX_CPU_ISA");
  if (best == nullptr || *best == '\0') return true;
  bool is_found = false;
  for (const char* name : {"portable", "avx2", "avx512", "avx512_bf16", "amx"}) {
    is_found |= asked == name;
    if (best == std::string(name)) return is_found;
  }
  throw std::invalid_argument(
      std::string("RAY_HETERO_MAX_CPU_ISA: expected portable, avx2, avx512, avx512_bf16 or amx, got ") +
      best);
}

inline bool has_avx2() {
  return is_allowed("avx2") && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
         __builtin_cpu_supports("f16c");
}

inline bool has_avx512() {
  return is_allowed("avx512") && has_avx2() && __builtin_cpu_supports("avx512f") &&
         __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
         __builtin_cpu_supports("avx512dq");
}

inline bool has_avx512_bf16() {
  return is_allowed("avx512_bf16") && has_avx512() && __builtin_cpu_supports("avx512bf16");
}

// Whether there is AMX-BF16 and the kernel lets this process use its state.
inline bool has_amx() {
  constexpr unsigned kBf16 = 1u << 22, kTiles = 1u << 24;
  constexpr int kRequestPermission = 0x1023, kTileData = 18;  // asm/prctl.h, not in every libc
  unsigned eax, ebx, ecx, edx;
  if (!is_allowed("amx") || !has_avx512_bf16()) return false;
  if (!__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx)) return false;
  if ((edx & kBf16) == 0 || (edx & kTiles) == 0) return false;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

}  // namespace ray_hetero

#endif
