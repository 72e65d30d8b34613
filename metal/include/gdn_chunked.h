// A block of the chunkwise scan: where its parts lie in threadgroup memory, the decays between its rows, and the work element by element.
#ifndef LILY_GDN_CHUNKED_H
#define LILY_GDN_CHUNKED_H
#include <metal_simdgroup_matrix>
#include "lily.h"

#define CHUNK_ROWS 64u     // of a block
#define CHUNK_COLUMNS 32u  // of a head's state, to a threadgroup
#define CHUNK_STEP 16u     // of Dk, staged at once
#define CHUNK_LD 20u       // row of a staged step, in floats: 16 and a pad that spreads rows over banks
#define CHUNK_TILES 36u    // 8 x 8 tiles on and under the diagonal of 64 x 64, row by row
#define CHUNK_THREADS 256u

typedef simdgroup_matrix<float, 8, 8> Tile;

struct ChunkMemory {
  threadgroup float* staged;    // two steps [64][CHUNK_LD] of k, then q; between the passes o [64][32]
  threadgroup float* square;    // CHUNK_TILES tiles: -A and the inverses of the diagonal tiles of I + A, then P
  threadgroup float* right;     // [64][32]: a step of S, then the right sides, then D
  threadgroup float* inner;     // [64][8]: of row t and element j of its tile, the product of g over j+1..t; 0 for j > t
  threadgroup float* outer;     // [9][9]: at (r, c+1) the product of g over the tiles between c and r; c = -1 is the block's start, r = 8 its end
  threadgroup float* prefix;    // [64]: the product of g from the start of the row's tile to the row
  threadgroup float* gate;      // [64]
  threadgroup float* beta;      // [64]
  threadgroup float* diagonal;  // a tile: the block's whole decay times I
};

// Rows [begin, begin + n) of a head: row t is at t C from q, k and v.
struct ChunkBlock {
  uint begin, n;
  uint tiles;  // of 8 rows, that hold rows
  uint pairs;  // of tiles on and under the diagonal
};

// A block ends at a multiple of 64 of the position, at a snapshot row, and with the rows.
inline ChunkBlock chunk_block(constant LilyStep& step, uint begin) {
  uint end = metal::min(step.rows, begin + CHUNK_ROWS - (step.position + begin) % CHUNK_ROWS);
  for (uint i = 0; i < metal::min(step.n_snapshots, uint(LILY_MAX_SNAPSHOTS)); i++) {
    const uint row = step.snapshot_rows[i];
    if (row >= begin && row + 1u < end) end = row + 1u;
  }
  const uint tiles = (end - begin + 7u) / 8u;
  return {begin, end - begin, tiles, tiles * (tiles + 1u) / 2u};
}

// Tile row of the index-th tile on or under the diagonal; its column is index - r (r + 1) / 2.
inline uint tile_row(uint index) {
  uint r = 0;
  while ((r + 1u) * (r + 2u) / 2u <= index) r++;
  return r;
}
inline uint tile_column(uint index, uint r) { return index - r * (r + 1u) / 2u; }

// All decays are products of g, which lies in [0, 1]: nothing overflows, and no difference of large logarithms loses digits.
inline void chunk_decays(thread const ChunkMemory& m, uint tid) {
  if (tid < CHUNK_ROWS) {
    float product = 1.0f;
    for (uint j = 8u; j-- > 0u;) {
      const bool before = j <= tid % 8u;
      m.inner[tid * 8u + j] = before ? product : 0.0f;
      if (before) product *= m.gate[tid / 8u * 8u + j];
    }
    m.prefix[tid] = product;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (tid < 81u) {
    float product = 1.0f;
    for (uint tile = tid % 9u; tile < tid / 9u; tile++) product *= m.prefix[tile * 8u + 7u];
    m.outer[tid] = product;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (tid < 64u) m.diagonal[tid] = tid / 8u == tid % 8u ? m.outer[72] : 0.0f;
}
inline float decay_from_start(thread const ChunkMemory& m, uint t) { return m.prefix[t] * m.outer[t / 8u * 9u]; }
inline float decay_to_end(thread const ChunkMemory& m, uint i) { return m.inner[(i / 8u * 8u + 7u) * 8u + i % 8u] * m.outer[72u + i / 8u + 1u]; }
// From after row i to row t; 1 for t == i, 0 for i > t.
inline float decay_between(thread const ChunkMemory& m, uint t, uint i) {
  const uint r = t / 8u, c = i / 8u;
  if (r == c) return m.inner[t * 8u + i % 8u];
  return m.prefix[t] * m.outer[r * 9u + c + 1u] * m.inner[(c * 8u + 7u) * 8u + i % 8u];
}

// A step of x, four values a thread, into [64][CHUNK_LD]; rows past the block are zero.
inline void stage_rows(device const float* x, uint C, thread const ChunkBlock& b, float scale, threadgroup float* to, uint tid) {
  const uint row = tid / 4u, at = tid % 4u * 4u;
  const float4 v = row < b.n ? *(device const float4*)(x + ulong(b.begin + row) * C + at) : float4(0.0f);
  *(threadgroup float4*)(to + row * CHUNK_LD + at) = v * scale;
}

// square: products k k^T to -beta decay (k k^T), under the diagonal alone. LAST: products q k^T to decay (q k^T), with the diagonal.
template <bool LAST> inline void weigh_square(thread const ChunkMemory& m, thread const ChunkBlock& b, uint tid) {
  for (uint e = tid; e < b.pairs * 64u; e += CHUNK_THREADS) {
    const uint r = tile_row(e / 64u), t = r * 8u + e / 8u % 8u, i = tile_column(e / 64u, r) * 8u + e % 8u;
    const float weight = decay_between(m, t, i);
    m.square[e] = LAST ? m.square[e] * weight : i < t ? -(m.beta[t] * (m.square[e] * weight)) : 0.0f;
  }
}

// right: S^T k to beta (v - decay S^T k), and o: S^T q to decay S^T q. `v`: of row 0 and the first column; `columns` of them are live.
inline void weigh_right(thread const ChunkMemory& m, thread const ChunkBlock& b, device const float* v, uint C, uint columns, uint tid) {
  for (uint e = tid; e < b.tiles * 8u * CHUNK_COLUMNS; e += CHUNK_THREADS) {
    const uint t = e / CHUNK_COLUMNS, column = e % CHUNK_COLUMNS;
    const float decay = decay_from_start(m, t), value = t < b.n && column < columns ? v[ulong(b.begin + t) * C + column] : 0.0f;
    m.right[e] = m.beta[t] * metal::fma(-decay, m.right[e], value);
    m.staged[e] *= decay;
  }
}

// Each diagonal tile -A to the inverse of I + A, a column a thread; the eight threads of a tile are in one simdgroup.
inline void invert_diagonal(thread const ChunkMemory& m, thread const ChunkBlock& b, uint tid) {
  if (tid >= CHUNK_ROWS) return;
  const uint r = tid / 8u, column = tid % 8u;
  threadgroup float* tile = m.square + (r * (r + 3u) / 2u) * 64u;
  float x[8];
  LILY_UNROLL for (uint i = 0; i < 8u; i++) {
    x[i] = i == column ? 1.0f : 0.0f;
    if (r < b.tiles) LILY_UNROLL for (uint j = 0; j < i; j++) x[i] = metal::fma(tile[i * 8u + j], x[j], x[i]);
  }
  simdgroup_barrier(mem_flags::mem_threadgroup);
  if (r < b.tiles) LILY_UNROLL for (uint i = 0; i < 8u; i++) tile[i * 8u + column] = x[i];
}

#endif
