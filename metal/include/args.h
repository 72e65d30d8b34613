// Argument structs of every kernel: the contract between the recorder (C++), the CPU kernels and the Metal sources.
// Plain C, 4-byte fields only, so that both sides lay them out alike; sizes are asserted in csrc/ops/recorder.cpp.
// Shapes: T rows of a chunk, H hidden, D head dim, Hq/Hkv query and key-value heads, Nk/Nv linear key and value heads,
// Dk/Dv linear head dims, C = 2*Nk*Dk + Nv*Dv conv channels, E experts, k experts of a token, I expert width,
// S shared-expert width, V vocabulary. "act" is the activation storage: bfloat16, or float32 in the debug mode.
#ifndef LILY_ARGS_H
#define LILY_ARGS_H

#ifndef __METAL_VERSION__
#include <stdint.h>
#endif

#define LILY_KV_BLOCK 256      // tokens in a K/V block
#define LILY_MAX_SNAPSHOTS 8   // snapshot rows in one chunk
#define LILY_SSQ_BLOCK 16      // elements behind one partial sum of squares
#define LILY_GEMM_ROWS 256     // rows of one threadgroup in the CPU's matrix products of a chunk
#define LILY_CONV_ROWS 32      // rows of one threadgroup in the CPU's convolution of a chunk
#define LILY_ROW_BLOCK 16      // output rows of one threadgroup in the CPU's matrix-vector kernels
#define LILY_MAX_EXPERTS_PER_TOKEN 16
#define LILY_MAX_SEGMENTS 4
#define LILY_MAX_SPLITS 64     // key splits of decode attention
#define LILY_MAX_LOGPROBS 20
#define LILY_HIST_BINS 2048    // first radix digit (11 bits) of an order-preserving float key
#define LILY_SAMPLE_BLOCK 16384

// How a weight is stored. AFFINE: packed codes, value = scale*q + bias per group; the others are plain.
#define LILY_W_AFFINE 0u
#define LILY_W_BF16 1u
#define LILY_W_F16 2u
#define LILY_W_F32 3u

typedef struct {
  uint32_t kind;   // LILY_W_*
  uint32_t bits;   // 2, 3, 4, 5, 6, 8 when affine
  uint32_t group;  // 32, 64, 128 when affine
} LilyFormat;

// Bound as the symbol "step": what changes from one submission to the next.
typedef struct {
  uint32_t token;     // decode: the id to consume; written by the host (first step) or by the sampler of the step before
  uint32_t position;  // absolute position of row 0
  uint32_t rows;      // live rows of this chunk, at most the program's row bucket; 1 in decode
  uint32_t n_snapshots;
  uint32_t snapshot_rows[LILY_MAX_SNAPSHOTS];  // snapshot i is the state after this row of the chunk
} LilyStep;

#define LILY_SAMPLE_GREEDY 1u
#define LILY_SAMPLE_PENALTY 2u  // counts are read (and updated) only with this flag
#define LILY_SAMPLE_BIAS 4u
#define LILY_SAMPLE_MASK 8u
#define LILY_SAMPLE_LOGPROBS 16u

// Bound as the symbol "sample": one request's settings and, below, what the sampler writes.
typedef struct {
  uint32_t flags;
  float temperature;
  uint32_t top_k;  // 0: off
  float top_p;     // 1: off
  float min_p;     // 0: off
  float repetition_penalty;
  float presence_penalty;
  float frequency_penalty;
  uint32_t seed_lo, seed_hi;  // Philox4x32-10 key
  uint32_t position;          // Philox counter: absolute position of the token being drawn
  uint32_t n_logprobs;        // alternatives wanted, at most LILY_MAX_LOGPROBS
  // written by the device
  uint32_t token;
  float logprob;
  uint32_t top_ids[LILY_MAX_LOGPROBS];
  float top_logprobs[LILY_MAX_LOGPROBS];
} LilySample;

// ---- embedding, norms -------------------------------------------------------------------------------------------
// embed_step:  0 step, 1 codes, 2 scales, 3 biases, 4 h f32[H] (w), 5 ssq f32[H/16] (w). grid: 1
// embed_rows:  0 step, 1 ids i32[T], 2 codes, 3 scales, 4 biases, 5 h f32[T,H] (w). grid: T
typedef struct { LilyFormat fmt; uint32_t H; uint32_t V; } LilyEmbedArgs;

// rmsnorm_rows: 0 step, 1 h f32[T,H], 2 weight f32[H], 3 x act[T,H] (w). grid: T
// norm_final:   0 h f32[H], 1 ssq f32[H/16], 2 weight f32[H], 3 x act[H] (w), 4 hidden f32[H] (w, a copy of h). grid: 1
// residual_rows: 0 step, 1 y f32[T,H], 2 h f32[T,H] (rw). grid: T.   h += y
// residual_norm_rows: 0 step, 1 y f32[T,H], 2 h f32[T,H] (rw), 3 weight f32[H], 4 x act[T,H] (w). grid: T.   h += y; x = norm of h
// residual_step: 0 y f32[H], 1 h f32[H] (rw), 2 ssq f32[H/16] (w). grid: 1.   h += y; the kernel tests' twin of gemv_residual and moe_down, in no program
// take_rows:    0 step, 1 h f32[T,H], 2 hidden f32[H] (w: last live row), 3.. 3+8: snapshot hidden f32[H] (w), 11 all f32[T,H] (w, when copy_all). grid: T
typedef struct { uint32_t H; float eps; uint32_t copy_all; } LilyNormArgs;

// ---- matrix-vector (decode). grid: rows/16 of all segments together ----------------------------------------------
typedef struct {
  uint32_t rows;
  uint32_t out;    // element offset of this segment in y
  uint32_t round;  // 1: the value is rounded to the activation storage (kept as f32)
} LilySegment;

// gemv:          0 x act[K], 1 y f32 (w), 2+3s: codes, scales, biases of segment s.   y_s = W_s x
// gemv_norm:     0 h f32[K], 1 ssq f32[K/16], 2 weight f32[K], 3 y f32 (w), 4+3s: codes, scales, biases of segment s.
//                x = round(h * rsqrt(sum(ssq)/K + eps) * weight); y_s = W_s x
// gemv_residual: 0 x act[K], 1 h f32[N] (rw), 2 ssq f32[N/16] (w), 3 codes, 4 scales, 5 biases.   h += W x
typedef struct { LilyFormat fmt; uint32_t K; uint32_t n_segments; float eps; LilySegment seg[LILY_MAX_SEGMENTS]; } LilyGemvArgs;

// gate_up_norm:  0 h, 1 ssq, 2 weight, 3 a act[I] (w), 4-6 gate, 7-9 up.      a = round(silu(G x) * (U x)). grid: I/16
typedef struct { LilyFormat gate; LilyFormat up; uint32_t K; uint32_t I; float eps; } LilyGateUpArgs;

// ---- mixture of experts -----------------------------------------------------------------------------------------
// moe_gate_up: 0 h, 1 ssq, 2 weight, 3 logits f32[E], 4 ids u32[k] (w), 5 route f32[k] (w), 6 a act[k,I] (w), 7-9 gate, 10-12 up, 13-15 ninth_gate, 16-18 ninth_up, 19 shared act[S] (w).
//              top-k of softmax(logits), ties to the lower index; a_j = round(silu(G_ej x) * (U_ej x)). grid: k * I/16; threadgroup 0 writes ids and route
//              with `ninth` the shared expert too, in the formats of the others: S/16 threadgroups more
// moe_down:    0 a act[k,I], 1 ids, 2 route, 3 shared act[S], 4 shared_logit f32[1], 5 h f32[H] (rw), 6 ssq (w), 7-9 down, 10-12 shared down. grid: H/16
//              h += (sum over j of route_j * (D_ej a_j), j ascending) + sigmoid(shared_logit) * (D_s shared)
// moe_gemv:    0 ids u32[k], 1 x act[K] or act[k,K] (per_expert_input), 2 y f32[k,N] (w), 3-5 W.   y_j = W_ej x(_j). grid: k * N/16
typedef struct {
  LilyFormat a;  // gate, or down, or W
  LilyFormat b;  // up, or shared down
  uint32_t K, I, S, H, E, k;
  uint32_t a_stride, b_stride;  // rows between experts
  uint32_t per_expert_input;
  uint32_t ninth;
  float eps;
} LilyMoeArgs;

// moe_topk_rows: 0 step, 1 logits f32[T,E], 2 ids u32[T,k] (w), 3 route f32[T,k] (w). grid: T
// moe_group:     0 step, 1 ids u32[T,k], 2 offsets u32[E+1] (w), 3 slot_row u32[T*k] (w: row of each sorted slot), 4 slot_of u32[T,k] (w). grid: 1
//                slots are sorted by expert, then by row
// On GPUs three kernels take the place of moe_group, so that no threadgroup orders more than 64 rows. B = ceil(T/64).
// moe_histogram: 0 step, 1 ids u32[T,k], 2 counts u32[B,E] (w). grid: B
// moe_scan:      0 step, 1 counts u32[B,E], 2 offsets u32[E+1] (w), 3 base u32[B,E] (w: first slot of block b's rows of expert e), 4 tiles u32[max_tiles,4] (w: expert, first slot, rows, 0), 5 grids u32[2,3] (w). grid: 1
//                a tile is at most tile_rows slots of one expert; grids: {ceil(N_a/64), tiles, 1} and {ceil(N_b/64), tiles, 1}; max_tiles = ceil(T*k/tile_rows) + E
// moe_scatter:   0 step, 1 ids u32[T,k], 2 base u32[B,E], 3 slot_row u32[T*k] (w), 4 slot_of u32[T,k] (w). grid: B
typedef struct { uint32_t E, k, T; uint32_t tile_rows; uint32_t N_a, N_b; } LilyRouteArgs;

// moe_gemm_rows:    0 offsets, 1 slot_row, 2 x act[T,K] (gathered by slot_row) or act[T*k,K] (by_slot), 3 y f32[T*k,N] (w), 4-6 W. grid: E x N/64
// moe_gate_up_rows: 0 offsets, 1 slot_row, 2 x act[T,K], 3 a act[T*k,I] (w), 4-6 gate, 7-9 up. grid: E x I/64
//                   on GPUs both take two more buffers, 7 or 10 tiles and 8 or 11 grid u32[3], in place of offsets; grid: indirect
// moe_combine_rows: 0 step, 1 slot_of, 2 route, 3 y f32[T*k,H], 4 shared f32[T,H], 5 shared_logit f32[T], 6 h f32[T,H] (rw). grid: T
//                   h += (sum_j route_j * y[slot_of_j], j ascending) + sigmoid(shared_logit) * shared; slot_of absent: slot of (t, j) is t*k + j
typedef struct {
  LilyFormat a, b;
  uint32_t K, N, E, k, H;
  uint32_t a_stride, b_stride;
  uint32_t by_slot;
  uint32_t tile_rows;  // of the tile map, where there is one
} LilyMoeRowsArgs;

// ---- matrix-matrix (prefill). grid of the CPU: T/256 x N/64, all outputs of 256 rows, then the next rows ------------
// Weights are rounded to the activation storage. Order of sums, for every row count: blocks of 32 of K in order; in a block the
// even and the odd products are two sums from zero, then acc += even + odd.
// gemm:          0 step, 1 x act[T,K], 2 y f32[T,ldy] (w), 3-5 W
// gemm_residual: 0 step, 1 x act[T,K], 2 h f32[T,N] (rw), 3-5 W.   h += x W^T
// gate_up_rows:  0 step, 1 x act[T,K], 2 a act[T,N] (w), 3-5 gate, 6-8 up
// expand_rows:   0 codes, 1 scales, 2 biases, 3 w act[N,K] (w). grid: N.   what the products never hold; for the comparison alone
// swiglu_rows:   0 step, 1 gate f32[T,N], 2 up f32[T,N], 3 a act[T,N] (w). grid: T   (rows_per_token: k for experts)
typedef struct { LilyFormat fmt; LilyFormat up; uint32_t K, N; uint32_t ldy; uint32_t out; uint32_t round; uint32_t rows_per_token; } LilyGemmArgs;

// ---- Gated DeltaNet ----------------------------------------------------------------------------------------------
// A state value holds, per linear layer, conv act[3,C] (oldest first) and S f32[Nv,Dk,Dv] (Dv contiguous).
// gdn_step:   0 proj f32[qkv C | z Nv*Dv | b Nv | a Nv], 1 conv_w f32[4,C], 2 A f32[Nv] (-exp(A_log)), 3 dt_bias f32[Nv], 4 norm f32[Dv],
//             5 conv_in act[3,C], 6 S_in, 7 conv_out (w), 8 S_out (w), 9 o act[Nv*Dv] (w). grid: Nv
// conv_rows:  0 step, 1 qkv f32[T,ld] (rounded), 2 conv_w, 3 conv_in, 4 conv_out (w), 5 y f32[T,C] (w, after silu), 6.. 6+8 snapshot conv (w). grid: T/32
// gdn_prepare_rows: 0 step, 1 y f32[T,C] (rw: q and k are normalised in place, q scaled by Dk^-0.5), 2 b f32[T,Nv], 3 a f32[T,Nv], 4 A, 5 dt_bias, 6 gates f32[T,Nv,2] (w: g, beta). grid: T
// gdn_scan:   0 step, 1 y f32[T,C], 2 gates, 3 S_in, 4 S_out (rw: only the comparison that scans in blocks reads it), 5 o f32[T,Nv*Dv] (w), 6.. 6+8 snapshot S (w). grid: Nv * Dv/64
//             per token: u = S k, p = S q (both of the old state, dk ascending); m = g u; d = beta (v - m); S = g S + d k^T; o = g p + d (k.q)
// gated_norm_rows: 0 step, 1 o f32[T,Nv*Dv], 2 z f32[T,ld], 3 norm f32[Dv], 4 x act[T,Nv*Dv] (w). grid: T
typedef struct { uint32_t Nk, Nv, Dk, Dv; uint32_t ld_qkv, ld_z, ld_ba; float eps; } LilyGdnArgs;

// ---- attention ---------------------------------------------------------------------------------------------------
// K and V arenas: act[blocks][Hkv][256][D]; table u32[blocks of the session]. qkv row: Hq x (D query | D gate), then Hkv*D keys, Hkv*D values.
// attn_prepare: 0 step, 1 qkv f32[row], 2 q_norm f32[D], 3 k_norm f32[D], 4 table, 5 K (w), 6 V (w), 7 q act[Hq,D] (w). grid: Hq + Hkv
// attn_split:   0 step, 1 q act[Hq,D], 2 table, 3 K, 4 V, 5 o f32[splits,Hq,D] (w), 6 ml f32[splits,Hq,2] (w: max, sum). grid: Hkv * n_splits
//               split s covers blocks [s*b, (s+1)*b), b = blocks_per_split; splits past the last key write max = -inf, sum = 0
// attn_split_long: 0 step, 1 q act[Hq,D], 2 table, 3 K, 4 V, 5 o f32[64,Hq,D] (w), 6 ml f32[64,Hq,2] (w). grid: Hkv * 64.   (GPUs, D 256, Hq = 8 Hkv)
//               as attn_split, but the splits share the context's own n blocks: split s covers [s*n/64, (s+1)*n/64)
// attn_combine: 0 step, 1 o, 2 ml, 3 x (w): act[Hq*D] with the sigmoid gate when gated, else f32, 4 qkv f32[row] (absent when not gated). grid: Hq
// attn_prepare_rows: 0 step, 1 qkv f32[T,row], 2 q_norm, 3 k_norm, 4 table, 5 K (w), 6 V (w), 7 q act[T,Hq,D] (w). grid: T
// attn_rows:    0 step, 1 q act[T,Hq,D], 2 qkv f32[T,row] (for the gate), 3 table, 4 K, 5 V, 6 x act[T,Hq*D] when gated, else f32 (w). grid: Hkv x ceil(T/rows_per_group)
//               on GPUs a chunk is cut by keys: a dispatch meets key blocks [first_block, first_block + key_blocks) and hands on, in
//               7 o f32[T,Hq,D] (rw) and 8 ml f32[T,Hq,2] (rw), what has not met its own position yet; grid: ceil(T*Hq/Hkv/32) x Hkv
// twins: head_norm_rows: 0 step, 1 qkv, 2 weight f32[D], 3 out f32[T,heads,D] (w). grid: T       (query or key heads, by `key`)
//        rope_rows:      0 step, 1 x f32[T,heads,D], 2 q act[T,heads,D] (w). grid: T             (query heads)
//        kv_write_rows:  0 step, 1 k f32[T,Hkv,D] (normed, roped here), 2 qkv (values), 3 table, 4 K (w), 5 V (w). grid: T
//        gate_rows:      0 step, 1 o f32[T,Hq*D], 2 qkv, 3 x act[T,Hq*D] (w). grid: T
typedef struct {
  uint32_t Hq, Hkv, D, R;  // R rotary dims
  uint32_t ld;             // row length of qkv
  uint32_t n_splits, blocks_per_split;
  uint32_t gated;
  uint32_t key;  // head_norm_rows: 1 normalises the keys
  uint32_t rows_per_group;
  uint32_t first_block, key_blocks;  // of LILY_KV_BLOCK keys; key_blocks 0: all
  float rope_theta, eps, scale;
} LilyAttnArgs;

// ---- head and sampling -------------------------------------------------------------------------------------------
// head: rmsnorm_rows + gemm on at most 64 rows; score_rows: 0 step, 1 logits f32[64,V], 2 targets i32[64], 3 out f32[64] (w). grid: 64
// sample_adjust: 0 sample, 1 logits f32[V], 2 counts u32[V] (bit 31: in the session; low bits: times in this output), 3 bias f32[V], 4 mask u32[V/32],
//                5 y f32[V] (w), 6 block f32[blocks,4] (w: max, id of max as bits, sum exp(y-max), 0), 7 hist u32[blocks,2048] (w). grid: V/16384
// sample_mass:   0 sample, 1 y, 2 block, 3 mass f32[blocks,2048] (w: sum exp((y-M)/T) by digit). grid: V/16384; idle unless top_p without top_k, or (GPUs: sums of 512 ids) a plain draw
// sample_draw:   0 sample (rw), 1 y, 2 block, 3 hist, 4 mass, 5 list f32[V,2] (rw, scratch), 6 counts (rw), 7 next step (w: token). grid: 1
typedef struct { uint32_t V; uint32_t blocks; } LilySampleArgs;

#endif
