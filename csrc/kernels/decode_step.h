// A decode step of decoder layers that follow one another, in one parallel region.
//
// Called layer by layer, each attention costs three operators of Python's, and calling all threads
// together twice, several times what it computes while conversations are short.
//
// A step may end with the attention of its last layer, so that what lies behind it can be computed
// elsewhere: it is then given row by row, and nothing of that layer's PostAttention is read but its
// shapes.
//
// Included once for each level, see levels.h.

#pragma once

#include "this_level.h"

#include "adapters.h"
#include "attention.h"
#include "column_share.h"
#include "few_tokens.h"
#include "layers.h"
#include "post_attention.h"
#include "sum_over_ranks.h"
#include "team.h"

namespace ray_hetero::RAY_HETERO_LEVEL {

class DecodeStep {
 public:
  // `requests` are those of each group of layers, all of the same tokens.
  DecodeStep(const DecoderLayers& layers, const std::vector<Cache>& caches,
             const std::vector<Requests>& requests, const Step& step)
      : layers_(layers), caches_(caches), requests_(requests), step_(step),
        m_(requests.front().m),
        normed_places_{m_, layers.first.qkv.w.k(), kHasTiles} {
    const std::int64_t m = m_, qkv = layers.first.qkv.w.n();
    const std::int64_t queries = layers.layers.front().post_attention.output.w.k();
    const Places places{m, queries, kHasTiles};
    reserve();
    normed_ = scratch_bf16(normed_places_.elements() + qkv * m + places.elements(), kLayers);
    std::uint16_t* qkv_at = normed_ + normed_places_.elements();
    std::uint16_t* attended = qkv_at + qkv * m;
    first_task_ =
        task_of(layers.first.qkv, normed_, normed_places_, qkv_at);
    const AdapterSlots slots = used(step.slots, m);
    first_.emplace(layers.first.qkv, first_task_, slots);
    for (std::size_t i = 0; i < layers.layers.size(); ++i) {
      const DecoderLayer& layer = layers.layers[i];
      attentions_.emplace_back(layer.rotation, layer.scores, caches[i],
                               requests_[caches[i].group], parts_of(i), qkv_at, attended, places);
      std::uint16_t* y = layer.post_attention.next ? qkv_at : step.y;
      blocks_.emplace_back(layer.post_attention, attended, places, step.sum, step.sum, y, slots,
                           step.share, step.kept, step.kept_outputs);
    }
  }

  void run() {
    if (step_.share != nullptr) step_.share->begin();
    together([this] { reserve_own(); },
             [this](int thread, int threads, Barrier& barrier) { work(thread, threads, barrier); });
    // All layers are of one group.
    const RankSums* sums = layers_.layers.front().post_attention.sums;
    if (sums != nullptr) sums->check();
    if (step_.share != nullptr) step_.share->check();
  }

 private:
  // What the scratch memory gives must not move while the layers share it.
  void reserve() {
    Product::reserve(layers_.first.qkv, m_);
    for (std::size_t i = 0; i < layers_.layers.size(); ++i) {
      const DecoderLayer& layer = layers_.layers[i];
      PostAttentionBlock::reserve(layer.post_attention, m_);
      scratch(Attention::partial(layer.rotation, parts_of(i)), kPartial);
    }
  }

  // How the attention of a layer is shared out; layers with the same blocks and window share it.
  const Parts& parts_of(std::size_t layer) {
    const std::size_t group = caches_[layer].group;
    const std::int64_t window = layers_.layers[layer].scores.window;
    for (const Divided& one : parts_) {
      if (one.group == group && one.window == window) return one.parts;
    }
    const std::int64_t kv_heads = layers_.layers[layer].rotation.kv_heads;
    parts_.push_back({group, window, Parts(requests_[group], kv_heads, window)});
    return parts_.back().parts;
  }

  // A thread's own memory.
  void reserve_own() const {
    FewTokens::reserve_own(first_task_);
    for (const DecoderLayer& layer : layers_.layers) Attention::reserve_own(layer.rotation);
    for (const PostAttentionBlock& block : blocks_) block.reserve_own();
  }

  void work(int thread, int threads, Barrier& barrier) {
    ReadAhead first = first_->ahead(thread);
    add_and_norm_some(thread, threads, {step_.hidden, step_.residual}, layers_.first.norm,
                      step_.sum, normed_, normed_places_);
    barrier.wait(first);
    first_->work(thread, threads);
    first_->finish(thread, threads, barrier, first);
    for (std::size_t i = 0; i < attentions_.size(); ++i) {
      ReadAhead output = blocks_[i].ahead(thread);
      barrier.wait(output);
      if (attentions_[i].writes_first()) {
        attentions_[i].write(thread, threads);
        barrier.wait(output);
      }
      attentions_[i].work(thread);
      barrier.wait(output);
      if (!blocks_[i].work(thread, threads, barrier)) return;
    }
  }

  struct Divided {
    std::size_t group;
    std::int64_t window;
    Parts parts;
  };

  const DecoderLayers& layers_;
  const std::vector<Cache>& caches_;
  const std::vector<Requests>& requests_;
  const Step& step_;
  const std::int64_t m_;
  const Places normed_places_;
  std::deque<Divided> parts_;  // none is moved
  std::uint16_t* normed_ = nullptr;
  Task first_task_{};
  std::optional<Product> first_;
  std::deque<Attention> attentions_;  // neither is moved
  std::deque<PostAttentionBlock> blocks_;
};

inline void run(const DecoderLayers& layers, const std::vector<Cache>& caches,
                const std::vector<Requests>& requests, const Step& step) {
  DecodeStep(layers, caches, requests, step).run();
}

}  // namespace ray_hetero::RAY_HETERO_LEVEL
