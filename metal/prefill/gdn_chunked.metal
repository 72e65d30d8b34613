// gdn_scan in the chunkwise form (S. Yang et al., Gated Delta Networks, 2024: the WY representation): 64 rows at once, as matrix products.
// With c_t the product of g over rows 1..t of a block and S the state before it (products of g stand for all decays: none is a quotient):
//   A_ti = beta_t c_t/c_i (k_t.k_i) for i < t;  P_ti = c_t/c_i (q_t.k_i) for i <= t
//   (I + A) D = beta (V - c K S);  O = c Q S + P D;  S = c_64 S + sum_i c_64/c_i k_i d_i^T
// step, y f32[T,C] (q and k normalised), gates f32[T,Nv,2] (g, beta), S_in f32[Nv,Dk,Dv] -> S_out, o f32[T,Nv*Dv], snapshots of S; all of it in
// float32, in the tiles too. grid: ceil(Dv/32) x Nv threadgroups of 8 simdgroups. Of a head's 32 columns, each simdgroup keeps one tile of 8 x 8
// of every 16 rows of S, in fragments, from the first row to the last. No workspace.
// Bytes moved: S read and written once, 8 Nv Dk Dv; k twice and q once per 32 columns of each value head; v, gates and o once.
// Order of sums: dot products over Dk ascending from zero; a row of D from its right side, earlier tiles of 8 rows ascending, then its own tile
// by the inverse of that tile; o from c q S, tiles ascending; S from c_64 S, rows ascending.
// Blocks end at multiples of 64 of the position, at snapshot rows and with the chunk. A row's bits depend on where its block began, so with this
// form a session must read again, up to 63 rows, what a cut has split. Hence it is one choice per device, off by default; only the sequential
// gdn_scan keeps every bit wherever a chunk is cut.
#include "lily.h"
#include "gdn_chunked.h"

// This simdgroup's tiles of a head's state to or from memory; `at` is the first element of its first tile.
template <uint N> inline void load_tiles(device const float* at, uint Dk, uint Dv, bool live, thread Tile* s) {
  LILY_UNROLL for (uint i = 0; i < 2u * N; i++) {
    s[i] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
    if (live && i * CHUNK_STEP < Dk) simdgroup_load(s[i], at + i * CHUNK_STEP * Dv, Dv);
  }
}
template <uint N> inline void store_tiles(thread const Tile* s, uint Dk, uint Dv, bool live, device float* at) {
  LILY_UNROLL for (uint i = 0; i < 2u * N; i++)
    if (live && i * CHUNK_STEP < Dk) simdgroup_store(s[i], at + i * CHUNK_STEP * Dv, Dv);
}

// D in place of the right sides, a column of tiles a simdgroup.
inline void solve(thread const ChunkMemory& m, thread const ChunkBlock& b, uint column) {
  Tile d[8], a;
  LILY_UNROLL for (uint r = 0; r < 8u; r++) {
    if (r < b.tiles) {
      threadgroup float* here = m.right + r * 8u * CHUNK_COLUMNS + column * 8u;
      Tile sum;
      simdgroup_load(sum, here, CHUNK_COLUMNS);
      LILY_UNROLL for (uint c = 0; c < r; c++) {
        simdgroup_load(a, m.square + (r * (r + 1u) / 2u + c) * 64u, 8);
        simdgroup_multiply_accumulate(sum, a, d[c], sum);
      }
      simdgroup_load(a, m.square + (r * (r + 3u) / 2u) * 64u, 8);
      d[r] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
      simdgroup_multiply_accumulate(d[r], a, sum, d[r]);
      simdgroup_barrier(mem_flags::mem_threadgroup);
      simdgroup_store(d[r], here, CHUNK_COLUMNS);
    }
  }
}

// P D added to o. Row tiles r and 7 - r of two columns of tiles: nine products a column for every simdgroup.
inline void add_products(thread const ChunkMemory& m, thread const ChunkBlock& b, uint simd) {
  for (uint half_row = 0; half_row < 2u; half_row++) {
    const uint r = half_row == 0u ? simd % 4u : 7u - simd % 4u;
    if (r < b.tiles) {
      threadgroup float* here = m.staged + r * 8u * CHUNK_COLUMNS + simd / 4u * 16u;
      threadgroup const float* d = m.right + simd / 4u * 16u;
      Tile o[2], p, x;
      LILY_UNROLL for (uint j = 0; j < 2u; j++) simdgroup_load(o[j], here + 8u * j, CHUNK_COLUMNS);
      for (uint c = 0; c <= r; c++) {
        simdgroup_load(p, m.square + (r * (r + 1u) / 2u + c) * 64u, 8);
        LILY_UNROLL for (uint j = 0; j < 2u; j++) {
          simdgroup_load(x, d + c * 8u * CHUNK_COLUMNS + 8u * j, CHUNK_COLUMNS);
          simdgroup_multiply_accumulate(o[j], p, x, o[j]);
        }
      }
      simdgroup_barrier(mem_flags::mem_threadgroup);
      LILY_UNROLL for (uint j = 0; j < 2u; j++) simdgroup_store(o[j], here + 8u * j, CHUNK_COLUMNS);
    }
  }
}

template <uint N>
kernel void gdn_chunked(constant LilyStep& step [[buffer(0)]], device const float* y [[buffer(1)]], device const float* gates [[buffer(2)]],
                        device const float* S_in [[buffer(3)]], device float* S_out [[buffer(4)]], device float* o [[buffer(5)]],
                        device float* snapshot0 [[buffer(6)]], device float* snapshot1 [[buffer(7)]], device float* snapshot2 [[buffer(8)]],
                        device float* snapshot3 [[buffer(9)]], device float* snapshot4 [[buffer(10)]], device float* snapshot5 [[buffer(11)]],
                        device float* snapshot6 [[buffer(12)]], device float* snapshot7 [[buffer(13)]], constant LilyGdnArgs& args [[buffer(20)]],
                        constant uint& present [[buffer(21)]], uint2 group [[threadgroup_position_in_grid]],
                        uint simd [[simdgroup_index_in_threadgroup]], uint tid [[thread_index_in_threadgroup]]) {
  threadgroup float staged[2 * 64 * 20];
  threadgroup float square[36 * 64];
  threadgroup float right[64 * 32];
  threadgroup float inner[64 * 8];
  threadgroup float outer[9 * 9];
  threadgroup float prefix[64];
  threadgroup float gate[64];
  threadgroup float beta[64];
  threadgroup float diagonal[64];
  const ChunkMemory m = {staged, square, right, inner, outer, prefix, gate, beta, diagonal};

  const uint Dk = args.Dk, Dv = args.Dv, head = group.y, keys = args.Nk * Dk, C = 2u * keys + args.Nv * Dv;
  const uint column = group.x * CHUNK_COLUMNS, columns = metal::min(CHUNK_COLUMNS, Dv - column);
  const uint tile_dk = simd / 4u * 8u, tile_dv = simd % 4u * 8u;  // of this simdgroup's tile in 16 rows of S
  const bool live = tile_dv < columns;                            // Dv is a multiple of 8
  const ulong at = ulong(head) * Dk * Dv + tile_dk * Dv + column + tile_dv;
  device const float* q = y + head / (args.Nv / args.Nk) * Dk;
  device const float* k = q + keys;
  device const float* v = y + 2u * keys + head * Dv + column;

  Tile s[2 * N];
  load_tiles<N>(S_in + at, Dk, Dv, live, s);
  for (uint begin = 0; begin < step.rows;) {
    const ChunkBlock b = chunk_block(step, begin);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (tid < CHUNK_ROWS) {
      device const float* pair = gates + (ulong(begin + tid) * args.Nv + head) * 2u;
      gate[tid] = tid < b.n ? pair[0] : 1.0f;
      beta[tid] = tid < b.n ? pair[1] : 0.0f;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    chunk_decays(m, tid);

    // k k^T and q k^T, five tiles a simdgroup at most; k S and q S, eight rows a simdgroup.
    Tile kk[5], qk[5], ks[4], qs[4];
    uint row_of[5], column_of[5];
    LILY_UNROLL for (uint i = 0; i < 5u; i++) {
      kk[i] = qk[i] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
      row_of[i] = tile_row(simd + 8u * i);
      column_of[i] = tile_column(simd + 8u * i, row_of[i]);
    }
    LILY_UNROLL for (uint j = 0; j < 4u; j++) ks[j] = qs[j] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
    LILY_UNROLL for (uint i = 0; i < 2u * N; i++) {
      if (i * CHUNK_STEP < Dk) {
        threadgroup float* staged_q = staged + CHUNK_ROWS * CHUNK_LD;
        threadgroup_barrier(mem_flags::mem_threadgroup);
        stage_rows(k + i * CHUNK_STEP, C, b, 1.0f, staged, tid);
        stage_rows(q + i * CHUNK_STEP, C, b, 1.0f, staged_q, tid);
        simdgroup_store(s[i], right + tile_dk * CHUNK_COLUMNS + tile_dv, CHUNK_COLUMNS);
        threadgroup_barrier(mem_flags::mem_threadgroup);
        for (uint dk = 0; dk < CHUNK_STEP; dk += 8u) {
          Tile of_k, of_q, x;
          if (simd < b.tiles) {
            simdgroup_load(of_k, staged + simd * 8u * CHUNK_LD + dk, CHUNK_LD);
            simdgroup_load(of_q, staged_q + simd * 8u * CHUNK_LD + dk, CHUNK_LD);
            LILY_UNROLL for (uint j = 0; j < 4u; j++) {
              simdgroup_load(x, right + dk * CHUNK_COLUMNS + 8u * j, CHUNK_COLUMNS);
              simdgroup_multiply_accumulate(ks[j], of_k, x, ks[j]);
              simdgroup_multiply_accumulate(qs[j], of_q, x, qs[j]);
            }
          }
          LILY_UNROLL for (uint j = 0; j < 5u; j++) {
            if (simd + 8u * j < b.pairs) {
              simdgroup_load(x, staged + column_of[j] * 8u * CHUNK_LD + dk, CHUNK_LD, ulong2(0, 0), true);
              simdgroup_load(of_k, staged + row_of[j] * 8u * CHUNK_LD + dk, CHUNK_LD);
              simdgroup_load(of_q, staged_q + row_of[j] * 8u * CHUNK_LD + dk, CHUNK_LD);
              simdgroup_multiply_accumulate(kk[j], of_k, x, kk[j]);
              simdgroup_multiply_accumulate(qk[j], of_q, x, qk[j]);
            }
          }
        }
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    LILY_UNROLL for (uint j = 0; j < 5u; j++)
      if (simd + 8u * j < b.pairs) simdgroup_store(kk[j], square + (simd + 8u * j) * 64u, 8);
    if (simd < b.tiles) {
      LILY_UNROLL for (uint j = 0; j < 4u; j++) {
        simdgroup_store(ks[j], right + simd * 8u * CHUNK_COLUMNS + 8u * j, CHUNK_COLUMNS);
        simdgroup_store(qs[j], staged + simd * 8u * CHUNK_COLUMNS + 8u * j, CHUNK_COLUMNS);
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    weigh_square<false>(m, b, tid);
    weigh_right(m, b, v, C, columns, tid);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    invert_diagonal(m, b, tid);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (simd < 4u) solve(m, b, simd);
    threadgroup_barrier(mem_flags::mem_threadgroup);

    LILY_UNROLL for (uint j = 0; j < 5u; j++)
      if (simd + 8u * j < b.pairs) simdgroup_store(qk[j], square + (simd + 8u * j) * 64u, 8);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    weigh_square<true>(m, b, tid);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    add_products(m, b, simd);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (uint e = tid; e < b.n * CHUNK_COLUMNS; e += CHUNK_THREADS) {
      const uint c = e % CHUNK_COLUMNS;
      if (c < columns) o[(ulong(begin + e / CHUNK_COLUMNS) * args.Nv + head) * Dv + column + c] = staged[e];
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);

    const float to_end = decay_to_end(m, tid / 4u);
    LILY_UNROLL for (uint i = 0; i < 2u * N; i++) {
      if (i * CHUNK_STEP < Dk) {
        threadgroup float* side = staged + i % 2u * CHUNK_ROWS * CHUNK_LD;  // the other half is still being read
        stage_rows(k + i * CHUNK_STEP, C, b, to_end, side, tid);
        threadgroup_barrier(mem_flags::mem_threadgroup);
        Tile sum = make_filled_simdgroup_matrix<float, 8, 8>(0.0f), x, d;
        simdgroup_load(x, diagonal, 8);
        simdgroup_multiply_accumulate(sum, x, s[i], sum);
        for (uint r = 0; r < b.tiles; r++) {
          simdgroup_load(x, side + r * 8u * CHUNK_LD + tile_dk, CHUNK_LD, ulong2(0, 0), true);
          simdgroup_load(d, right + r * 8u * CHUNK_COLUMNS + tile_dv, CHUNK_COLUMNS);
          simdgroup_multiply_accumulate(sum, x, d, sum);
        }
        s[i] = sum;
      }
    }
    begin += b.n;
    for (uint i = 0; i < metal::min(step.n_snapshots, uint(LILY_MAX_SNAPSHOTS)); i++) {
      if (step.snapshot_rows[i] + 1u == begin && is_bound(present, 6u + i)) {
        device float* to = i == 0u ? snapshot0 : i == 1u ? snapshot1 : i == 2u ? snapshot2 : i == 3u ? snapshot3
                         : i == 4u ? snapshot4 : i == 5u ? snapshot5 : i == 6u ? snapshot6 : snapshot7;
        store_tiles<N>(s, Dk, Dv, live, to + at);
      }
    }
  }
  store_tiles<N>(s, Dk, Dv, live, S_out + at);
}
LILY_INSTANTIATE(gdn_scan_chunked_32, gdn_chunked, 1)
LILY_INSTANTIATE(gdn_scan_chunked_64, gdn_chunked, 2)
LILY_INSTANTIATE(gdn_scan_chunked_128, gdn_chunked, 4)
LILY_INSTANTIATE(gdn_scan_chunked_256, gdn_chunked, 8)
