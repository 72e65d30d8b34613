// Kernels with one mistake each, and next to each the same kernel done right. tests/metal/test_sim_mistakes.py runs them all.
#include <metal_stdlib>
using namespace metal;

struct Numbers { uint n; uint flag; uint a; uint b; };

// flag 1: half of the lanes take part in the sum.
kernel void divergent_sum(device const float* x [[buffer(0)]], device float* y [[buffer(1)]], constant Numbers& p [[buffer(20)]], uint t [[thread_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]]) {
  float v = x[t];
  if (p.flag == 0 || lane < 16) v = simd_sum(v);
  y[t] = v;
}
LILY_INSTANTIATE(divergent_sum, divergent_sum)

// flag 1: one simdgroup passes the barrier by.
kernel void barrier_under_if(device float* y [[buffer(1)]], constant Numbers& p [[buffer(20)]], uint t [[thread_index_in_threadgroup]], uint sg [[simdgroup_index_in_threadgroup]]) {
  if (p.flag == 0 || sg != 1) threadgroup_barrier(mem_flags::mem_threadgroup);
  y[t] = 1.0f;
}
LILY_INSTANTIATE(barrier_under_if, barrier_under_if)

// flag 1: threads past n return before the barrier.
kernel void return_before_barrier(device float* y [[buffer(1)]], constant Numbers& p [[buffer(20)]], uint t [[thread_index_in_threadgroup]]) {
  if (p.flag == 1 && t >= p.n) return;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (t < p.n) y[t] = 1.0f;
}
LILY_INSTANTIATE(return_before_barrier, return_before_barrier)

// flag 1: no barrier between writing and reading what another thread wrote. flag 2: none between reading and writing it again.
kernel void exchange(device float* y [[buffer(1)]], constant Numbers& p [[buffer(20)]], uint t [[thread_index_in_threadgroup]]) {
  threadgroup float s[64];
  s[t] = 0.0f;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  float v = 0.0f;
  for (uint i = 0; i < 2; i++) {
    s[t] = float(t + i);
    if (p.flag != 1) threadgroup_barrier(mem_flags::mem_threadgroup);
    v += s[63 - t];
    if (p.flag != 2) threadgroup_barrier(mem_flags::mem_threadgroup);
  }
  y[t] = v;
}
LILY_INSTANTIATE(exchange, exchange)

// flag 1: the barrier orders device memory only, the hand-over is in threadgroup memory. flag 2: the other way round.
kernel void wrong_flags(device float* y [[buffer(1)]], constant Numbers& p [[buffer(20)]], uint t [[thread_index_in_threadgroup]]) {
  threadgroup float s[64];
  s[t] = 0.0f;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  s[t] = float(t);
  y[t] = 2.0f;
  if (p.flag == 1) {
    threadgroup_barrier(mem_flags::mem_device);
  } else if (p.flag == 2) {
    threadgroup_barrier(mem_flags::mem_threadgroup);
  } else {
    threadgroup_barrier(mem_flags::mem_device | mem_flags::mem_threadgroup);
  }
  float v = s[63 - t] + y[63 - t];
  threadgroup_barrier(mem_flags::mem_device);
  y[t] = v;
}
LILY_INSTANTIATE(wrong_flags, wrong_flags)

// flag 1: every threadgroup writes word 0.
kernel void same_word(device float* y [[buffer(1)]], constant Numbers& p [[buffer(20)]], uint g [[threadgroup_position_in_grid]], uint t [[thread_index_in_threadgroup]]) {
  if (t == 0) y[p.flag == 1 ? 0 : g] = 1.0f;
}
LILY_INSTANTIATE(same_word, same_word)

// flag 1: reads past the end of x; 2: writes past the end of y; 3: writes before its start; 4: reads buffer 2, which is not bound;
// 5: reads past the arguments; 6: writes x, which is bound for reading.
kernel void ranges(device float* x [[buffer(0)]], device float* y [[buffer(1)]], device const float* z [[buffer(2)]], constant Numbers& p [[buffer(20)]], uint t [[thread_index_in_threadgroup]]) {
  float v = x[p.flag == 1 ? t + 1 : t];
  if (p.flag == 4) v += z[t];
  if (p.flag == 5) v += float((&p)[1].n);
  if (p.flag == 6) x[t] = v;
  device float* to = y + t;
  if (p.flag == 2) to += 1;
  if (p.flag == 3) to -= 1;
  *to = v;
}
LILY_INSTANTIATE(ranges, ranges)

// flag 1: an array in threadgroup memory is overrun. flag 2: the other array would be hit.
kernel void array_overrun(device float* y [[buffer(1)]], constant Numbers& p [[buffer(20)]], uint t [[thread_index_in_threadgroup]]) {
  threadgroup float first[32];
  threadgroup float second[32];
  first[t + (p.flag == 1 ? 1 : 0) + (p.flag == 2 ? 32 : 0)] = float(t);
  second[t] = 1.0f;
  y[t] = second[t];
}
LILY_INSTANTIATE(array_overrun, array_overrun)

// flag 1: the last lanes make one turn less.
kernel void unequal_turns(device float* y [[buffer(1)]], constant Numbers& p [[buffer(20)]], uint t [[thread_index_in_threadgroup]]) {
  float v = 0.0f;
  for (uint i = p.flag == 1 ? t : 0; i < 48; i += 32) v += simd_sum(1.0f);
  y[t] = v;
}
LILY_INSTANTIATE(unequal_turns, unequal_turns)

// flag 1: only half of the array is written before it is read.
kernel void uninitialised(device float* y [[buffer(1)]], constant Numbers& p [[buffer(20)]], uint t [[thread_index_in_threadgroup]]) {
  threadgroup float s[64];
  if (p.flag == 0 || t < 32) s[t] = 1.0f;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  y[t] = s[63 - t];
}
LILY_INSTANTIATE(uninitialised, uninitialised)

// Dispatched twice: y = x + 1. Without a barrier of the encoder the second dispatch must not read, or overwrite, what the first wrote.
kernel void add_one(device const float* x [[buffer(0)]], device float* y [[buffer(1)]], uint t [[thread_index_in_threadgroup]]) {
  y[t] = x[t] + 1.0f;
}
LILY_INSTANTIATE(add_one, add_one)

// flag 1: lanes of one simdgroup hand over through threadgroup memory without simdgroup_barrier. flag 2: simdgroup_barrier does not order two simdgroups.
kernel void hand_over(device float* y [[buffer(1)]], constant Numbers& p [[buffer(20)]], uint t [[thread_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]], uint sg [[simdgroup_index_in_threadgroup]]) {
  threadgroup float s[64];
  s[t] = 0.0f;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  s[t] = float(t);
  if (p.flag != 1) simdgroup_barrier(mem_flags::mem_threadgroup);
  y[t] = s[p.flag == 2 ? 63 - t : sg * 32 + 31 - lane];
}
LILY_INSTANTIATE(hand_over, hand_over)

// flag 1: a vector load that is not aligned to 16 bytes. flag 2: the same in threadgroup memory.
kernel void misaligned(device const float* x [[buffer(0)]], device float* y [[buffer(1)]], constant Numbers& p [[buffer(20)]], uint t [[thread_index_in_threadgroup]]) {
  threadgroup float s[256];
  for (uint i = t; i < 256; i += 32) s[i] = x[i];
  threadgroup_barrier(mem_flags::mem_threadgroup);
  uint at = 4 * t;
  if (t == 5 && p.flag == 1) at = 1;
  float4 v = *(device const float4*)(x + at);
  uint where = 4 * t;
  if (p.flag == 2) where = 2;
  float4 w = *(threadgroup const float4*)(s + where);
  y[t] = v.x + w.y;
}
LILY_INSTANTIATE(misaligned, misaligned)

// flag 1: a plain read beside atomic updates of other threads. flag 2: plain updates instead of atomic ones.
kernel void counting(device atomic_uint* total [[buffer(0)]], device uint* plain [[buffer(1)]], constant Numbers& p [[buffer(20)]], uint g [[threadgroup_position_in_grid]], uint t [[thread_index_in_threadgroup]]) {
  if (p.flag == 2) {
    plain[0] += 1;
  } else {
    atomic_fetch_add_explicit(total, 1u, memory_order_relaxed);
  }
  if (p.flag == 1) plain[1 + g * 32 + t] = ((device const uint*)total)[0];
}
LILY_INSTANTIATE(counting, counting)

// More threadgroup memory than there is.
kernel void too_much_memory(device float* y [[buffer(1)]], uint t [[thread_index_in_threadgroup]]) {
  threadgroup float s[8192];
  threadgroup float more[1];
  s[t] = 0.0f;
  if (t == 0) more[0] = 1.0f;
  y[t] = s[t];
}
LILY_INSTANTIATE(too_much_memory, too_much_memory)

// Lanes of two simdgroups wait at two different barriers.
kernel void two_barriers(device float* y [[buffer(1)]], constant Numbers& p [[buffer(20)]], uint t [[thread_index_in_threadgroup]], uint sg [[simdgroup_index_in_threadgroup]]) {
  if (p.flag == 1 && sg == 0) {
    y[t] = 1.0f;
    threadgroup_barrier(mem_flags::mem_threadgroup);
  } else {
    threadgroup_barrier(mem_flags::mem_threadgroup);
    y[t] = 2.0f;
  }
}
LILY_INSTANTIATE(two_barriers, two_barriers)
