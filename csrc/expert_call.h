// What computes a layer's routed experts, as the module of the kernels hands it to the module that
// waits for tokens: addresses of functions, for the two are built apart.

#pragma once

#include <cstdint>

namespace ray_hetero {

// A layer's tokens, by address.
struct ExpertTokensAt {
  const void* x;              // [m][hidden]
  const std::int32_t* ids;    // [m][chosen], negative for an expert that is not here
  const float* weights;       // [m][chosen]
  void* y;                    // [m][hidden], of the type of x
  std::int64_t m, hidden, chosen;
};

// Null, or what went wrong, valid until the same thread's next call.
using ComputeExperts = const char* (*)(const void* context, const ExpertTokensAt& tokens);

// Call work(context) while the threads that compute stay ready for the next layer; what it throws
// comes back.
using WithTeam = void (*)(void (*work)(void*), void* context);

}  // namespace ray_hetero
