// A decode step of decoder layers that follow one another, in one parallel region.
//
// Called layer by layer, each attention costs three operators of Python's, and calling all threads
// together twice, several times what it computes while conversations are short.
//
// Included once for each level, see levels.h.

namespace ray_hetero::RAY_HETERO_LEVEL {

class DecodeStep {
 public:
  DecodeStep(const DecoderLayers& layers, const std::vector<Cache>& caches,
             const Requests& requests, const Step& step)
      : layers_(layers), requests_(requests), step_(step),
        normed_places_{requests.m, layers.first.qkv.w.k(), kHasTiles},
        parts_(requests, layers.layers.front().rotation.kv_heads) {
    const std::int64_t m = requests.m, qkv = layers.first.qkv.w.n();
    const Places places{m, layers.layers.front().post_attention.output.w.k(),
                        kHasTiles};
    reserve();
    normed_ = scratch_bf16(normed_places_.elements() + qkv * m + places.elements(), kLayers);
    std::uint16_t* qkv_at = normed_ + normed_places_.elements();
    std::uint16_t* attended = qkv_at + qkv * m;
    first_task_ =
        task_of(layers.first.qkv, normed_, normed_places_, qkv_at);
    first_.emplace(first_task_);
    for (std::size_t i = 0; i < layers.layers.size(); ++i) {
      const DecoderLayer& layer = layers.layers[i];
      std::uint16_t* y = layer.post_attention.next ? qkv_at : step.y;
      attentions_.emplace_back(layer.rotation, layer.scale, caches[i], requests_, parts_,
                               qkv_at, attended, places);
      blocks_.emplace_back(layer.post_attention, attended, places, step.sum, step.sum, y);
    }
  }

  void run() {
    together([this] { reserve_own(); },
             [this](int thread, int threads, Barrier& barrier) { work(thread, threads, barrier); });
    // All layers are of one group.
    const RankSums* sums = layers_.layers.front().post_attention.sums;
    if (sums != nullptr) sums->check();
  }

 private:
  // What the scratch memory gives must not move while the layers share it.
  void reserve() const {
    FewTokens::reserve(layers_.first.qkv.w, requests_.m);
    for (const DecoderLayer& layer : layers_.layers) {
      PostAttentionBlock::reserve(layer.post_attention, requests_.m);
      scratch(Attention::partial(layer.rotation, parts_), kPartial);
    }
  }

  // A thread's own memory.
  void reserve_own() const {
    FewTokens::reserve_own(first_task_);
    for (const PostAttentionBlock& block : blocks_) block.reserve_own();
  }

  void work(int thread, int threads, Barrier& barrier) {
    ReadAhead first = first_->ahead(thread);
    add_and_norm_some(thread, threads, step_.hidden, step_.residual, layers_.first.norm,
                      step_.sum, normed_, normed_places_);
    barrier.wait(first);
    first_->work(thread);
    for (std::size_t i = 0; i < attentions_.size(); ++i) {
      ReadAhead output = blocks_[i].ahead(thread);
      barrier.wait(output);
      attentions_[i].write(thread, threads);
      barrier.wait(output);
      attentions_[i].work(thread);
      barrier.wait(output);
      if (!blocks_[i].work(thread, threads, barrier)) return;
    }
  }

  const DecoderLayers& layers_;
  const Requests requests_;
  const Step& step_;
  const Places normed_places_;
  const Parts parts_;
  std::uint16_t* normed_ = nullptr;
  Task first_task_{};
  std::optional<FewTokens> first_;
  std::deque<Attention> attentions_;  // neither is moved
  std::deque<PostAttentionBlock> blocks_;
};

inline void run(const DecoderLayers& layers, const std::vector<Cache>& caches,
                const Requests& requests, const Step& step) {
  DecodeStep(layers, caches, requests, step).run();
}

}  // namespace ray_hetero::RAY_HETERO_LEVEL
