// Every intrinsic of emulated/avx512.h once, for compare_intrinsics.cpp: included once over emulated
// ones and once over the compiler's.  `add` takes a name, a result and whether it is of floats.

template <typename Add>
void run_cases(const unsigned char* given, Add&& add) {
  const __m512 a = _mm512_loadu_ps(given), b = _mm512_loadu_ps(given + 64);
  const __m512 c = _mm512_loadu_ps(given + 128);
  const __m512i i = _mm512_loadu_si512(given), j = _mm512_loadu_si512(given + 64);
  const __m512i k = _mm512_loadu_si512(given + 128);
  const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(given + 3));
  const __m128i quarter = _mm_loadu_si128(reinterpret_cast<const __m128i*>(given + 5));
  const auto mask = static_cast<__mmask16>(given[9] | given[10] << 8);
  const auto wide_mask = static_cast<__mmask32>(given[11] << 17 ^ given[12] << 5 ^ given[13]);

  add("_mm512_loadu_ps", a, true);
  add("_mm512_loadu_si512", i, false);
  alignas(64) unsigned char room[64];
  _mm512_storeu_ps(room, a);
  add("_mm512_storeu_ps", room, false);
  _mm512_storeu_si512(room, j);
  add("_mm512_storeu_si512", room, false);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(room), half);
  add("_mm256_storeu_si256", room, false);
  add("_mm256_loadu_si256", half, false);
  add("_mm_loadu_si128", quarter, false);
  const __m512i near = _mm512_and_si512(i, _mm512_set1_epi32(15));
  add("_mm512_i32gather_epi32", _mm512_i32gather_epi32(near, given, 2), false);
  add("_mm512_setzero_ps", _mm512_setzero_ps(), true);
  add("_mm512_set1_ps", _mm512_set1_ps(static_cast<float>(given[0])), true);
  add("_mm512_set1_epi32", _mm512_set1_epi32(given[1] * -77777), false);
  add("_mm512_set1_epi16", _mm512_set1_epi16(static_cast<short>(given[1] * -77)), false);
  add("_mm512_set1_epi8", _mm512_set1_epi8(static_cast<char>(given[1])), false);
  const __m512i order = _mm512_setr_epi32(3, 1, 2, 0, 7, 5, 6, 4, 15, 9, 10, 8, 11, 13, 14, 12);
  add("_mm512_setr_epi32", order, false);
  add("_mm512_setr_epi64", _mm512_setr_epi64(1, -2, 3, 4, 5, 6, 7, 1ll << 40), false);

  add("_mm512_castps_si512", _mm512_castps_si512(a), false);
  add("_mm512_castsi512_ps", _mm512_castsi512_ps(i), false);
  // What is undefined is cut off.
  add("_mm512_castsi128_si512",
      _mm512_shuffle_epi8(_mm512_broadcast_i64x4(
                              _mm512_extracti64x4_epi64(_mm512_castsi128_si512(quarter), 0)),
                          _mm512_setr_epi64(0x0706050403020100, 0x0f0e0d0c0b0a0908, -1, -1, -1, -1,
                                            -1, -1)),
      false);
  add("_mm256_castsi128_si256",
      _mm512_and_si512(_mm512_cvtepu8_epi16(_mm256_castsi128_si256(quarter)),
                       _mm512_setr_epi64(-1, -1, -1, -1, 0, 0, 0, 0)),
      false);
  add("_mm512_extracti64x4_epi64", _mm512_extracti64x4_epi64(i, 1), false);
  add("_mm512_broadcast_i32x4", _mm512_broadcast_i32x4(quarter), false);
  add("_mm512_broadcast_i64x4", _mm512_broadcast_i64x4(half), false);

  add("_mm512_add_ps", _mm512_add_ps(a, b), true);
  add("_mm512_sub_ps", _mm512_sub_ps(a, b), true);
  add("_mm512_mul_ps", _mm512_mul_ps(a, b), true);
  add("_mm512_div_ps", _mm512_div_ps(a, b), true);
  add("_mm512_fmadd_ps", _mm512_fmadd_ps(a, b, c), true);
  add("_mm512_fmsub_ps", _mm512_fmsub_ps(a, b, c), true);
  add("_mm512_mask_max_ps", _mm512_mask_max_ps(c, mask, a, b), true);
  add("_mm512_maskz_mov_ps", _mm512_maskz_mov_ps(mask, a), true);
  add("_mm512_reduce_add_ps", _mm512_reduce_add_ps(a), true);
  // Of numbers: NaN and zeros of two signs depend on an order that no instruction has.
  const __m512 numbers = _mm512_castsi512_ps(_mm512_or_si512(
      _mm512_and_si512(i, _mm512_set1_epi32(0x3fffffff)), _mm512_set1_epi32(0x100000)));
  add("_mm512_reduce_max_ps", _mm512_reduce_max_ps(numbers), true);
  add("_mm512_roundscale_ps",
      _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC), true);
  add("_mm512_scalef_ps", _mm512_scalef_ps(a, b), true);
  const __m512 small = _mm512_roundscale_ps(_mm512_mul_ps(b, _mm512_set1_ps(0x1p-20f)), 8);
  add("_mm512_scalef_ps", _mm512_scalef_ps(a, small), true);
  add("_mm512_cmp_ps_mask", _mm512_cmp_ps_mask(a, b, _CMP_UNORD_Q), false);

  add("_mm512_add_epi32", _mm512_add_epi32(i, j), false);
  add("_mm512_add_epi16", _mm512_add_epi16(i, j), false);
  add("_mm512_mullo_epi32", _mm512_mullo_epi32(i, j), false);
  add("_mm512_min_epi32", _mm512_min_epi32(i, j), false);
  add("_mm512_max_epu32", _mm512_max_epu32(i, j), false);
  add("_mm512_and_si512", _mm512_and_si512(i, j), false);
  add("_mm512_or_si512", _mm512_or_si512(i, j), false);
  add("_mm512_mask_or_epi32", _mm512_mask_or_epi32(k, mask, i, j), false);
  add("_mm512_ternarylogic_epi32", _mm512_ternarylogic_epi32(i, j, k, 0xea), false);
  add("_mm512_ternarylogic_epi32", _mm512_ternarylogic_epi32(i, j, k, 0x1b), false);
  add("_mm512_testn_epi16_mask", _mm512_testn_epi16_mask(i, _mm512_and_si512(j, k)), false);
  add("_mm512_testn_epi8_mask", _mm512_testn_epi8_mask(i, _mm512_and_si512(j, k)), false);
  add("_mm512_slli_epi32", _mm512_slli_epi32(i, 7), false);
  add("_mm512_slli_epi32", _mm512_slli_epi32(i, 32), false);
  add("_mm512_slli_epi16", _mm512_slli_epi16(i, 8), false);
  add("_mm512_slli_epi16", _mm512_slli_epi16(i, 16), false);
  add("_mm512_srli_epi32", _mm512_srli_epi32(i, 9), false);
  add("_mm512_srli_epi32", _mm512_srli_epi32(i, 40), false);
  add("_mm512_srli_epi16", _mm512_srli_epi16(i, 4), false);
  add("_mm512_srli_epi16", _mm512_srli_epi16(i, 17), false);
  add("_mm512_srai_epi32", _mm512_srai_epi32(i, 3), false);
  add("_mm512_srai_epi32", _mm512_srai_epi32(i, 32), false);
  add("_mm512_srai_epi16", _mm512_srai_epi16(i, 1), false);
  add("_mm512_srai_epi16", _mm512_srai_epi16(i, 16), false);

  add("_mm512_shuffle_epi8", _mm512_shuffle_epi8(i, j), false);
  add("_mm512_unpacklo_epi8", _mm512_unpacklo_epi8(i, j), false);
  add("_mm512_unpackhi_epi8", _mm512_unpackhi_epi8(i, j), false);
  add("_mm512_packus_epi32", _mm512_packus_epi32(_mm512_srai_epi32(i, 15), j), false);
  add("_mm512_permutexvar_ps", _mm512_permutexvar_ps(i, b), false);
  add("_mm512_permutexvar_epi64", _mm512_permutexvar_epi64(i, j), false);
  add("_mm512_permutexvar_epi16", _mm512_permutexvar_epi16(i, j), false);
  add("_mm512_mask_blend_epi16", _mm512_mask_blend_epi16(wide_mask, i, j), false);
  add("_mm512_maskz_permutexvar_epi16", _mm512_maskz_permutexvar_epi16(wide_mask, i, j), false);

  add("_mm512_cvtepu16_epi32", _mm512_cvtepu16_epi32(half), false);
  add("_mm512_cvtepu8_epi16", _mm512_cvtepu8_epi16(half), false);
  add("_mm512_cvtepu8_epi32", _mm512_cvtepu8_epi32(quarter), false);
  add("_mm512_cvtepi32_epi16", _mm512_cvtepi32_epi16(i), false);
  add("_mm512_cvtph_ps", _mm512_cvtph_ps(half), true);
  add("_mm512_cvtps_ph", _mm512_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT), false);
  // Few floats are as small as those of float16.
  add("_mm512_cvtps_ph", _mm512_cvtps_ph(_mm512_cvtph_ps(half), _MM_FROUND_TO_NEAREST_INT), false);
}

// Those of AVX512-BF16.
template <typename Add>
void run_bf16_cases(const unsigned char* given, Add&& add) {
  const __m512 a = _mm512_loadu_ps(given), b = _mm512_loadu_ps(given + 64);
  const __m512i i = _mm512_loadu_si512(given), j = _mm512_loadu_si512(given + 128);
  add("_mm512_cvtneps_pbh", _mm512_cvtneps_pbh(a), false);
  add("_mm512_cvtne2ps_pbh", _mm512_cvtne2ps_pbh(a, b), false);
  add("_mm512_dpbf16_ps", _mm512_dpbf16_ps(b, (__m512bh)i, (__m512bh)j), true);
}
