// The C interface between the sim device of the extension and the simulator library that `python -m tests.sim build` makes.
#ifndef LILY_SIM_ABI_H
#define LILY_SIM_ABI_H
#include <stdint.h>
#ifdef __cplusplus
extern "C" {
#endif

#define LILY_SIM_ABI 1u

#define LILY_SIM_READ 1u
#define LILY_SIM_WRITE 2u

// One bound range. A touch outside of [data, data + bytes), or against its access, is an error.
typedef struct {
  void* data;  // null: not bound
  uint64_t bytes;
  uint32_t access;   // LILY_SIM_READ | LILY_SIM_WRITE
  const char* name;  // for messages and counters
} LilySimBuffer;

typedef struct {
  const char* function;  // host name
  const char* label;     // where in the model, for messages
  const uint32_t* constants;
  uint32_t n_constants;
  uint32_t grid[3];
  uint32_t threads;  // per threadgroup
  const LilySimBuffer* buffers;
  uint32_t n_buffers;
  const void* args;  // bound at index 20
  uint32_t args_bytes;
  uint32_t present;  // bound at index 21
} LilySimLaunch;

// What one launch did. The accesses of a simdgroup's lanes by one instruction are one access: its bytes count once each, however many lanes ask for them.
// Transactions: distinct 128-byte lines of the buffer that such an access touches; useful: its bytes.
typedef struct {
  const char* name;  // of the buffer
  uint64_t bytes_read, bytes_written;
  uint64_t unique_bytes_read, unique_bytes_written;  // every byte counted once
  uint64_t transactions, useful_bytes;
} LilySimTraffic;

typedef struct {
  uint64_t threadgroups, barriers;  // threadgroup barriers executed, counted once a threadgroup
  uint32_t threadgroup_bytes;       // threadgroup memory declared by the kernel
  uint32_t n_traffic;
  LilySimTraffic traffic[32];
} LilySimCounters;

uint32_t lily_sim_abi(void);
// storage: 0 bfloat16, 1 float32. A context runs one launch at a time. Null when the storage is not built in.
void* lily_sim_open(uint32_t storage);
void lily_sim_close(void* context);
// Checking off: faster, no race, range or initialisation checks. Seed: the order of lanes, simdgroups and threadgroups; 0 is ascending.
void lily_sim_set(void* context, uint32_t checking, uint64_t seed, uint32_t counting);
// A barrier of the concurrent encoder: what was launched before it happens before what comes after.
void lily_sim_barrier(void* context);
// 0, or 1 with a message in `error` (what went wrong, kernel, file and line, buffer).
int lily_sim_launch(void* context, const LilySimLaunch* launch, char* error, uint64_t error_bytes);
// Of the last launch; needs counting.
const LilySimCounters* lily_sim_counters(void* context);
// Names of all functions, newline-separated.
const char* lily_sim_functions(void* context);

#ifdef __cplusplus
}
#endif
#endif
