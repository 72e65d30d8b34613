// Rows of q and k between device memory and the slots of gdn.h: lane l of a simdgroup holds elements l N .. l N + N - 1.
#ifndef LILY_GDN_ROWS_H
#define LILY_GDN_ROWS_H
#include "gdn.h"

// `live`: l N < Dk. Dk is a multiple of 16, so a lane has all of its elements or none; without them x stays as it is.
template <uint N> inline void load_slots(device const float* row, bool live, uint lane, thread float* x) {
  if (!live) return;
  if (N == 1u) x[0] = row[lane];
  if (N == 2u) {
    float2 v = ((device const float2*)row)[lane];
    x[0] = v.x, x[N - 1] = v.y;
  }
  LILY_UNROLL for (uint j = 0; j + 3u < N; j += 4u) {
    float4 v = ((device const float4*)row)[(lane * N + j) / 4u];
    x[j] = v.x, x[j + 1u] = v.y, x[j + 2u] = v.z, x[j + 3u] = v.w;
  }
}
template <uint N> inline void store_slots(thread const float* x, bool live, uint lane, device float* row) {
  if (!live) return;
  if (N == 1u) row[lane] = x[0];
  if (N == 2u) ((device float2*)row)[lane] = float2(x[0], x[N - 1]);
  LILY_UNROLL for (uint j = 0; j + 3u < N; j += 4u) ((device float4*)row)[(lane * N + j) / 4u] = float4(x[j], x[j + 1u], x[j + 2u], x[j + 3u]);
}

#endif
