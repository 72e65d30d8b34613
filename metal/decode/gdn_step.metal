// gdn_step: one decode step of Gated DeltaNet between its input and output projections, one value head per threadgroup.
//   y = silu(conv over the three stored rows and this one), q and k l2-normalised, q * Dk^-0.5
//   g = exp(A softplus(a + dt_bias)), beta = sigmoid(b); u = S k, p = S q (old state, so that both sums are independent)
//   d = beta (v - g u); S' = g S + d k^T; o = round(rms(g p + d (k.q)) * norm * silu(z))
// proj f32[C + Nv*Dv + 2 Nv] (qkv | z | b | a), conv_w f32[4,C], A, dt_bias f32[Nv], norm f32[Dv], conv act[3,C], S f32[Nv,Dk,Dv]
// -> conv', S', o act[Nv*Dv]. grid: Nv threadgroups of 512.
// Bytes moved: S read and written once (8 Nv Dk Dv), from and to registers; a simdgroup reads 32 neighbouring columns of a row.
// A thread owns a column and a quarter of Dk: 8 N values of the state. Its first loads start before anything else is computed.
// Order of sums in gdn.h: the bits of conv_rows, gdn_prepare_rows, gdn_scan and gated_norm_rows with one row.
#include "lily.h"
#include "gdn.h"

#define COLUMNS 128u   // of a pass
#define MAX_HEAD 256u  // of Dk and Dv

// This thread's part of the state: rows first .. first + 8 N - 1 of a column; zero outside.
template <uint N> inline void load_state(device const float* S, uint first, uint Dk, uint Dv, uint column, thread float* s) {
  LILY_UNROLL for (uint i = 0; i < 8u * N; i++) {
    s[i] = 0.0f;
    if (column < Dv && first + i < Dk) s[i] = S[(first + i) * Dv + column];
  }
}

// The sum over this thread's eight slots of s * x.
template <uint N> inline float eight_slots(thread const float* s, thread const float* x) {
  return slot_tree(slot_dot<N>(s, x), slot_dot<N>(s + N, x + N), slot_dot<N>(s + 2u * N, x + 2u * N), slot_dot<N>(s + 3u * N, x + 3u * N),
                   slot_dot<N>(s + 4u * N, x + 4u * N), slot_dot<N>(s + 5u * N, x + 5u * N), slot_dot<N>(s + 6u * N, x + 6u * N),
                   slot_dot<N>(s + 7u * N, x + 7u * N));
}
template <uint N> inline void load_slots(threadgroup const float* x, uint first, thread float* out) {
  threadgroup const float4* x4 = (threadgroup const float4*)(x + first);
  LILY_UNROLL for (uint i = 0; i < 2u * N; i++) {
    float4 v = x4[i];
    out[4u * i] = v.x, out[4u * i + 1u] = v.y, out[4u * i + 2u] = v.z, out[4u * i + 3u] = v.w;
  }
}

template <uint N>
kernel void gdn_step(device const float* proj [[buffer(0)]], device const float* conv_w [[buffer(1)]], device const float* A [[buffer(2)]],
                     device const float* dt_bias [[buffer(3)]], device const float* norm [[buffer(4)]], device const act* conv_in [[buffer(5)]],
                     device const float* S_in [[buffer(6)]], device act* conv_out [[buffer(7)]], device float* S_out [[buffer(8)]],
                     device act* o [[buffer(9)]], constant LilyGdnArgs& args [[buffer(20)]], uint n [[threadgroup_position_in_grid]],
                     uint thread_index [[thread_index_in_threadgroup]], uint threads [[threads_per_threadgroup]],
                     uint simd [[simdgroup_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]]) {
  threadgroup float4 q4[MAX_HEAD / 4];
  threadgroup float4 k4[MAX_HEAD / 4];
  threadgroup float v[MAX_HEAD];
  threadgroup float heads[MAX_HEAD];
  threadgroup float u_part[4 * COLUMNS];
  threadgroup float p_part[4 * COLUMNS];
  threadgroup float gates[2];
  threadgroup float* q = (threadgroup float*)q4;
  threadgroup float* k = (threadgroup float*)k4;
  const uint Dk = args.Dk, Dv = args.Dv, keys = args.Nk * Dk, values = args.Nv * Dv, C = 2u * keys + values;
  const uint ratio = args.Nv / args.Nk, key = n / ratio, column = thread_index % COLUMNS, quarter = thread_index / COLUMNS, first = quarter * 8u * N;
  device const float* S = S_in + ulong(n) * Dk * Dv;
  device float* S_new = S_out + ulong(n) * Dk * Dv;

  float s[8 * N];
  load_state<N>(S, first, Dk, Dv, column, s);

  // Convolution of the head's q, k and v; the first value head of a key head writes that key's stored rows.
  for (uint i = thread_index; i < 2u * Dk + Dv; i += threads) {
    uint c = i < Dk ? key * Dk + i : i < 2u * Dk ? keys + key * Dk + (i - Dk) : 2u * keys + n * Dv + (i - 2u * Dk);
    act x1 = conv_in[C + c], x2 = conv_in[2u * C + c];
    float now = proj[c];
    float y = conv_silu(conv_w[c], conv_w[C + c], conv_w[2u * C + c], conv_w[3u * C + c], act_value(conv_in[c]), act_value(x1), act_value(x2), now);
    if (i < Dk) q[i] = y;
    else if (i < 2u * Dk) k[i - Dk] = y;
    else v[i - 2u * Dk] = y;
    if (i >= 2u * Dk || n % ratio == 0u) {
      conv_out[c] = x1;
      conv_out[C + c] = x2;
      conv_out[2u * C + c] = round_act(now);
    }
  }
  for (uint i = Dk + thread_index; i < 32u * N; i += threads) q[i] = k[i] = 0.0f;
  threadgroup_barrier(mem_flags::mem_threadgroup);

  if (simd < 2u) {  // simdgroup 0 normalises q, 1 k
    threadgroup float* head = simd == 0u ? q : k;
    float t[N];
    LILY_UNROLL for (uint j = 0; j < N; j++) t[j] = head[lane * N + j];
    normalise_head<N>(t, simd == 0u ? query_scale(Dk) : 1.0f);
    LILY_UNROLL for (uint j = 0; j < N; j++) head[lane * N + j] = t[j];
  } else if (simd == 2u && lane == 0u) {
    device const float* b = proj + C + values;
    gates[0] = decay_gate(b[args.Nv + n], A[n], dt_bias[n]);
    gates[1] = beta_gate(b[n]);
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);

  float a[N], b[N];
  LILY_UNROLL for (uint j = 0; j < N; j++) a[j] = k[lane * N + j], b[j] = q[lane * N + j];
  const float kq = dk_dot<N>(a, b), g = gates[0], beta = gates[1];
  for (uint c0 = 0u; c0 < Dv; c0 += COLUMNS) {
    const uint c = c0 + column;
    float t[8 * N];
    load_slots<N>(q, first, t);
    p_part[quarter * COLUMNS + column] = eight_slots<N>(s, t);
    load_slots<N>(k, first, t);
    u_part[quarter * COLUMNS + column] = eight_slots<N>(s, t);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (c < Dv) {
      float u = (u_part[column] + u_part[COLUMNS + column]) + (u_part[2u * COLUMNS + column] + u_part[3u * COLUMNS + column]);
      float d = delta(v[c], u, g, beta);
      LILY_UNROLL for (uint i = 0; i < 8u * N; i++)
        if (first + i < Dk) S_new[(first + i) * Dv + c] = updated(s[i], g, d, t[i]);
      if (quarter == 0u) {
        float p = (p_part[column] + p_part[COLUMNS + column]) + (p_part[2u * COLUMNS + column] + p_part[3u * COLUMNS + column]);
        heads[c] = scan_output(p, g, d, kq);
      }
    }
    if (c0 + COLUMNS < Dv) load_state<N>(S, first, Dk, Dv, c + COLUMNS, s);
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }

  device const float* z = proj + C + n * Dv;
  const float r = rms_from_total(square_sum((threadgroup const float*)heads, Dv, lane), Dv, args.eps);
  for (uint i = thread_index; i < Dv; i += threads) o[n * Dv + i] = round_act(gated_norm(heads[i], r, norm[i], z[i]));
}
LILY_INSTANTIATE(gdn_step_32, gdn_step, 1)
LILY_INSTANTIATE(gdn_step_64, gdn_step, 2)
LILY_INSTANTIATE(gdn_step_128, gdn_step, 4)
LILY_INSTANTIATE(gdn_step_256, gdn_step, 8)
