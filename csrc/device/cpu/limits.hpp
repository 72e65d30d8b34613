// What this machine can do at most, measured with its own instructions: reading memory, multiply-adds, table lookups.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

namespace lily {

// What can be measured here, of: "read" (bytes/s), "lookup" (4-bit codes/s turned into floats), "fma" (fp32 operations/s, two for each multiply-add),
// "int8" (operations/s of 8-bit dot products), "amx_bf16", "amx_int8" (operations/s of the tile unit).
std::vector<std::string> limit_kinds();

struct LimitRequest {
  std::string kind;
  uint64_t bytes = 0;  // read: the working set, shared evenly by the threads and read again and again
  int threads = 1;
  int windows = 5;
  double seconds = 0.1;  // of one window, at least
};

// Rates of one window, by the clock on the wall and by the time that the threads really ran: the second hardly sees other processes on the same cores.
struct LimitWindow {
  double wall, running;
};

// InvalidArgument for a kind that this machine lacks.
std::vector<LimitWindow> measure_limit(const LimitRequest& request);

}  // namespace lily
