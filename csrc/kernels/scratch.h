// Memory that a thread keeps from call to call: fresh pages would cost more than the sums.

#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>

namespace ray_hetero {

// Memory that a thread keeps from call to call: fresh pages would cost more than the sums.
class Scratch {
 public:
  // At least `bytes`, on a cache line: tiles whose rows straddle two lines load half as fast.
  void* get(std::size_t bytes) {
    if (bytes > size_) {
      const std::size_t size = (bytes + kLine - 1) / kLine * kLine;
      size_ = 0;
      memory_.reset(std::aligned_alloc(kLine, size));
      if (memory_ == nullptr) throw std::bad_alloc();
      size_ = size;
    }
    return memory_.get();
  }

 private:
  static constexpr std::size_t kLine = 64;
  struct Free {
    void operator()(void* memory) const { std::free(memory); }
  };
  std::unique_ptr<void, Free> memory_;
  std::size_t size_ = 0;
};

// What a thread keeps: sums for all threads and its own, tokens packed for all and for itself, rows
// that were compact; what is between the products of post_attention.h, parts of attention.h,
// what is between the layers of decode_step.h, and between the products of adapters.h; tokens by
// expert, what is between the products of experts.h, and their results; sums of groups of codes.h,
// their scales, and sums of their inputs; what is between the products of latent_layer.h, a thread's
// latents as they are multiplied in latent_attention.h, and its scores; a token's inputs as floats;
// what a thread has of its own in attention.h; what is between the products of gated_delta_layer.h and
// mamba2_mixer.h, and a thread's query and key in gated_delta.h.
enum Buffer {
  kSums, kOwnSums, kSharedTokens, kOwnTokens, kExpanded, kBetween, kPartial, kLayers, kShrunk,
  kGathered, kActivated, kResults, kGroupSums, kScales, kInputSums,
  kLatents, kOwnLatents, kOwnScores, kFloats, kOwnHeads,
  kStates, kOwnKeys, kBuffers
};

inline float* scratch(std::size_t floats, Buffer which) {
  static thread_local Scratch kept[kBuffers];
  return static_cast<float*>(kept[which].get(floats * sizeof(float)));
}

inline std::uint16_t* scratch_bf16(std::size_t elements, Buffer which) {
  return reinterpret_cast<std::uint16_t*>(scratch((elements + 1) / 2, which));
}

}  // namespace ray_hetero
