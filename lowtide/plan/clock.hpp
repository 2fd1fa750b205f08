// Time with copies beside the ops.
#pragma once

#include "problem.hpp"

namespace {

// How far compute and the copies are: the twin of Engines in engines.py.
struct Clock {
  const Problem &g;
  double now = 0;
  double free[MOST_LANES] = {};

  explicit Clock(const Problem &problem) : g(problem) {}

  void run(double seconds) {
    while (true) {
      double taken = 0, until = INFINITY;
      bool busy = false;
      for (Int lane = 0; lane < g.lanes; ++lane)
        if (free[lane] > now) busy = true, taken += g.takes[lane], until = std::min(until, free[lane]);
      if (!busy) {
        now += seconds;
        return;
      }
      const double speed = std::max(SLOWEST, 1.0 - taken), done = (until - now) * speed;
      if (done >= seconds) {
        now += seconds / speed;
        return;
      }
      seconds -= done, now = until;
    }
  }

  double copy(Int op) {
    const Int lane = g.lane[op];
    free[lane] = std::max(now, free[lane]) + g.latency[lane] + g.transfer[op];
    return free[lane];
  }

  void wait(double arrival) { now = std::max(now, arrival); }
};

}  // namespace
