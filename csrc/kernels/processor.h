// What this processor has, and what the kernel lets this process use of it.

#pragma once

#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace ray_hetero {

inline bool has_avx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
         __builtin_cpu_supports("f16c");
}

inline bool has_avx512() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
}

inline bool has_avx512_bf16() { return has_avx512() && __builtin_cpu_supports("avx512bf16"); }

// Whether there is AMX-BF16 and the kernel lets this process use its state.
inline bool has_amx() {
  constexpr unsigned kBf16 = 1u << 22, kTiles = 1u << 24;
  constexpr int kRequestPermission = 0x1023, kTileData = 18;  // asm/prctl.h, not in every libc
  unsigned eax, ebx, ecx, edx;
  if (!has_avx512_bf16() || !__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx)) return false;
  if ((edx & kBf16) == 0 || (edx & kTiles) == 0) return false;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

}  // namespace ray_hetero

#endif
