// Steps of optimizers, but for their codes, whose tables Python makes (make sanitize-step).
#include <cstring>
#include <vector>
#include "../kernels/bitport_kernels.h"
#include "tests.h"
#include "weight.h"

namespace {

struct Kept { int32_t rule, count; float param, mean; };   // after a step with the numbers below, exactly

// p = 1, g = 1/2, m = 1/4, rate 1/4, beta1 = rest1 = beta2 = rest2 = 1/2: the mean becomes 3/8.
constexpr Kept kRules[] = {{BITPORT_SGD, 0, 0.875f, 0.25f}, {BITPORT_SGD, 1, 0.90625f, 0.375f}, {BITPORT_LION, 1, 0.75f, 0.375f}};

}  // namespace

// Moments beyond the count may hold anything.
void try_moments_that_are_none() {
  for (const Kept& wanted : kRules)
    for (const int64_t k : {128, 7})   // whole vectors, and less than one
      for (const int32_t isa : isas()) {
        std::vector<float> param(size_t(k), 1), grad(size_t(k), 0.5f), mean(size_t(k), 0.25f);
        BitportStep step{};
        std::memset(step.moments, 0x7f, sizeof step.moments);
        if (wanted.count) step.moments[0] = {mean.data(), nullptr, nullptr, BITPORT_F32, 0};
        step.param = param.data();
        step.grad = grad.data();
        step.n = 1;
        step.k = k;
        step.sign = step.decay = 1;
        step.beta1 = step.rest1 = step.beta2 = step.rest2 = 0.5f;
        step.rate = 0.25f;
        step.count = wanted.count;
        EXPECT(bitport_optimizer_step(wanted.rule, &step, 1, 1, isa) == 0, "a step");
        for (const float each : param) EXPECT(each == wanted.param, "rule %d: %g", wanted.rule, each);
        for (const float each : mean) EXPECT(each == wanted.mean, "the mean of rule %d: %g", wanted.rule, each);
        ++cases;
      }
}
