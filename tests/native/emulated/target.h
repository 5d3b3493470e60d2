// What emulated instructions are compiled for: loops over lanes become instructions of half the
// width, and products that are rounded once are no calls.

#if defined(__x86_64__)
#pragma GCC target("avx2,fma")
#endif
