// The numbers of the inner loops that could be others; as in settings.py, the source of each stands in brackets.
#pragma once

#include "doors.hpp"

namespace {

// planner.hpp: shaving
constexpr double TOGETHER = 1.5;  // times the least score: up to here values go in one round; as in settings.py [chosen]

// search.cpp: ruin and recreate. Lists are drawn from with equal chances.
constexpr double COPY_PRICES[] = {0, 0.02, 0.05, 0.1, 0.2, 0.4, 0.7, 1, 2};  // seconds for a second of copying [chosen]
constexpr double WEIGHT_NOISE = 0.5;                // of the logarithm of a value's weight [chosen]
constexpr double DEEP_CUT = 0.15, SHALLOW_CUT = 0.03;  // of the budget: how much lower a change aims at most [chosen]
constexpr Int BATCHES[] = {1, 2, 4};                // values that are let go in one round of shaving [chosen]
constexpr double PENALTIES[] = {0, 0, 1, 10};       // for the width of what is made again [chosen]
constexpr Int SHAVING_ROUNDS = 300;                 // of one change [chosen]
constexpr double PRICE_NOISE[] = {0, 0.2, 0.5};     // of the logarithm of what dropping a run gains [chosen]
constexpr Int TIDY_PASSES = 2;                      // over a changed sequence [chosen]
constexpr Int RUINED = 50;                          // one repeated run in so many is dropped, and two more [chosen]
constexpr double NEIGHBOURS = 0.5;                  // the chance that these are neighbours [chosen]
constexpr double RUINED_WEIGHT = 1e6;               // of what they made: it is let go last [chosen]

// exact.cpp and layout.cpp
constexpr std::size_t MOST_FEEDERS = 6;  // lazy runs that are made together with one other [chosen]
constexpr Int STRETCHES = 64;            // of time, each with a list of its boxes [chosen]

}  // namespace
