// Columns of MLPs that a GPU computes beside the cores, in decode steps.
//
// The cores leave out the last outputs of an MLP's gate and up.  As soon as all threads have what
// these multiply they ask for the rest, by a word in memory that the GPU's stream waits for; when
// they have computed their own columns they wait for another word, behind which the rest is there.
// They may leave out the last outputs of the MLP's last matrix too, with a word of its own, where the
// GPU computes all columns.  Words count: whoever waits, waits for a number, and nothing has to be
// taken back between two steps.

#pragma once

#include "read_ahead.h"
#include "team.h"

#include <atomic>
#include <chrono>
#include <cstdint>
#include <sstream>
#include <stdexcept>

namespace ray_hetero {

// What others were to compute has not come.
struct MissingColumns : std::runtime_error {
  using std::runtime_error::runtime_error;
};

class ColumnShare {
 public:
  // What both sides tell each other, each in a line of its own.
  struct Words {
    alignas(kLineBytes) std::atomic<std::uint32_t> asked;      // layers that were asked for
    alignas(kLineBytes) std::atomic<std::uint32_t> answered;   // layers whose columns are there
    alignas(kLineBytes) std::atomic<std::uint32_t> failed;     // not 0 if no more will come
    alignas(kLineBytes) std::atomic<std::uint32_t> projected;  // layers whose outputs are there
  };
  static_assert(std::atomic<std::uint32_t>::is_always_lock_free);
  static_assert(sizeof(Words) == 4 * kLineBytes);

  // `inputs` has room for what the gate multiplies, where Places has it, `columns` for the activated
  // columns that the GPU computes, [m][inner - kept], `outputs` for those of the MLP,
  // [m][hidden - outputs], or nullptr; all bf16 and for as many tokens as a step has.
  ColumnShare(Words* words, std::uint16_t* inputs, const std::uint16_t* columns,
              const std::uint16_t* outputs, double limit_s)
      : words_(*words), inputs_(inputs), columns_(columns), outputs_(outputs), limit_s_(limit_s) {}

  std::uint16_t* inputs() const { return inputs_; }
  const std::uint16_t* columns() const { return columns_; }
  const std::uint16_t* outputs() const { return outputs_; }
  // Layers that have been asked for up to now.
  std::uint32_t asked() const { return words_.asked.load(std::memory_order_relaxed); }

  // Before a step.
  void begin() { why_ = Why::kNone; }
  // Tokens that a step's inputs have room for; 0 for those of the step.  A GPU whose work is ordered
  // for a few numbers of tokens computes those of the next larger one.
  std::int64_t room() const { return room_; }
  void set_room(std::int64_t room) { room_ = room; }
  // Of it, what a step of m tokens leaves.
  std::int64_t more(std::int64_t m) const { return room_ == 0 ? 0 : room_ - m; }
  // One thread, when all have written their part of the inputs.
  void ask() { words_.asked.store(asked() + 1, std::memory_order_release); }
  // One thread: until the columns of the layer that was asked for last are there.
  void await(ReadAhead& ahead) { await(words_.answered, ahead); }
  // The same of its outputs.
  void await_outputs(ReadAhead& ahead) { await(words_.projected, ahead); }
  // Seconds that all cores have waited for columns up to now: what the GPU was late.
  double waited_s() const { return waited_s_; }
  // Whether columns are missing; for all threads behind a barrier with the one that has waited.
  bool is_lost() const { return why_ != Why::kNone; }
  void check() const {
    if (why_ == Why::kFailed) throw MissingColumns("the GPU's part of a decode step has failed");
    if (why_ == Why::kNone) return;
    std::ostringstream text;
    text << "the GPU's part of a decode step was not there in " << limit_s_
         << " s; with cpu.decode_gpu_share 0 the cores compute all of these steps";
    throw MissingColumns(text.str());
  }

 private:
  using Clock = std::chrono::steady_clock;
  using Seconds = std::chrono::duration<double>;
  enum class Why { kNone, kFailed, kLate };

  static constexpr std::int64_t kTurns = 1024;  // between two looks at the clock

  void await(const std::atomic<std::uint32_t>& word, ReadAhead& ahead) {
    const std::uint32_t number = asked();
    const Clock::time_point begin = Clock::now();
    for (std::int64_t turn = 1; why_ == Why::kNone && !is_there(word, number); ++turn) {
      ahead.fetch();
      pause();
      if (turn % kTurns != 0) continue;
      if (words_.failed.load(std::memory_order_acquire) != 0) why_ = Why::kFailed;
      if (Seconds(Clock::now() - begin).count() > limit_s_) why_ = Why::kLate;
    }
    waited_s_ += Seconds(Clock::now() - begin).count();
  }
  // Numbers go round.
  static bool is_there(const std::atomic<std::uint32_t>& word, std::uint32_t number) {
    const std::uint32_t there = word.load(std::memory_order_acquire);
    return static_cast<std::int32_t>(there - number) >= 0;
  }

  Words& words_;
  std::uint16_t* const inputs_;
  const std::uint16_t *const columns_, *const outputs_;
  const double limit_s_;
  Why why_ = Why::kNone;
  std::int64_t room_ = 0;
  double waited_s_ = 0;
};

}  // namespace ray_hetero
