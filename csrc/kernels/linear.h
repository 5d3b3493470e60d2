// y = x · Wᵀ + b in bf16, for the linear layers of a CPU rank.
//
// Included once for each level, see levels.h.
//
// Few tokens (a decode step): every weight is read once, so the only thing that counts is that all
// threads stream W without a pause.  W is cut into units of up to 64 KiB, parts of blocks; each thread
// gets a run of neighbouring units, and who has finished takes units from the end of others' runs
// (few_tokens.h, which has decode steps of more tokens too).
// Many tokens (a prefill): the tiles' multiplications count.  Tokens and a piece of W that fit
// together into the second-level cache are multiplied piece by piece (many_tokens.h).
//
// A sum is always taken over the same pieces in the same order, whichever thread took them: the
// result depends neither on the number of threads nor on chance.

#pragma once

#include "this_level.h"

#include "few_tokens.h"
#include "layers.h"
#include "many_tokens.h"
#include "sizes.h"

namespace ray_hetero::RAY_HETERO_LEVEL {

inline void run(const Task& given) {
  Task task = given;
  for (std::int64_t left = task.m; left > 0; left -= task.m) {
    task.m = std::min(left, kSlab);
    if (task.m > kFewTokens) {
      ManyTokens(task).run();
    } else {
      FewTokens(task).run();
    }
    task.x += task.m * task.stride;
    task.y += task.m * task.w.n();
  }
}

}  // namespace ray_hetero::RAY_HETERO_LEVEL
