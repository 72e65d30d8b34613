// attn_rows: causal attention of a chunk. o[t,h] = sum over keys k <= position + t of softmax(scale * q[t,h] . K[k]) * V[k], online over blocks of
// 64 keys (16 in float32); x = round(o * sigmoid(gate)), or o in f32 without a gate. step, q act[T,Hq,D], qkv f32[T,ld], table, K and V arenas.
// A threadgroup takes 32 neighbouring (row, query head) pairs of one kv head, rows first: they share each K and V row. 256 threads: simdgroup s
// holds, for pairs 8 (s/2) .. + 7, half of D of the output in registers and scores against half of the block's keys.
// grid: ceil(T * Hq/Hkv / 32) (fastest), Hkv. The workspace does not grow with the context.
// A dispatch meets key blocks [first_block, first_block + key_blocks) of 256: what has not met its own position is handed on in o and ml,
// in full, so that a cut chunk gives the bits of an uncut one.
// Bytes moved: K and V once per tile of 32 pairs. Order of sums: scores and outputs in ascending steps of 8 through simdgroup_matrix;
// p rounded to the storage, its sum unrounded: 8 neighbours in order (2 in float32), then eight lanes as a tree; blocks of keys at absolute
// multiples, ascending.
#include <metal_simdgroup_matrix>
#include "attn.h"

#define PAIRS 32u
#define THREADS 256u
#ifdef LILY_STORAGE_FLOAT32
#define KEYS 16u   // staged at a time
#define BLOCK 16u  // under one maximum
#define WIDE 2304u // activations that eight simdgroups' 8 x 36 floats take
#else
#define KEYS 32u
#define BLOCK 64u
#define WIDE 4608u
#endif
#define SCORE_LD (BLOCK + 4u)
#define P_LD (BLOCK + 8u)

// Where pair i of the threadgroup lies: its row of the chunk and its query head. Pairs past the end repeat the last one: they stay finite.
struct Pair {
  uint row, head;
};
inline Pair pair_at(uint i, uint pairs, uint kv, uint heads) {
  const uint at = metal::min(i, pairs - 1u);
  Pair p = {at / heads, kv * heads + at % heads};
  return p;
}

// `rows` rows of D values from device memory into a tile of LD values a row, zero from row `live` on.
template <uint D, uint LD> inline void stage_rows(device const act* from, uint rows, uint live, threadgroup act* to, uint tid) {
  constexpr uint PACKS = D / 4u;
  for (uint i = tid; i < rows * PACKS; i += THREADS) {
    const uint row = i / PACKS, pack = i % PACKS;
    threadgroup act_pack* out = (threadgroup act_pack*)(to + row * LD) + pack;
    *out = row < live ? ((device const act_pack*)from)[i] : pack_act(float4(0.0f, 0.0f, 0.0f, 0.0f));
  }
}

template <uint D>
kernel void attn_rows(constant LilyStep& step [[buffer(0)]], device const act* q [[buffer(1)]], device const float* qkv [[buffer(2)]], device const uint* table [[buffer(3)]],
                      device const act* k_arena [[buffer(4)]], device const act* v_arena [[buffer(5)]], device float* x [[buffer(6)]], device float* o_part [[buffer(7)]],
                      device float* ml_part [[buffer(8)]], constant LilyAttnArgs& args [[buffer(20)]], uint3 group [[threadgroup_position_in_grid]],
                      uint tid [[thread_index_in_threadgroup]], uint sg [[simdgroup_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]]) {
  constexpr uint LD = D + 8u, TILES = D / 16u;  // of 8 outputs: half of D
  threadgroup act_pack tile[(KEYS * LD > WIDE ? KEYS * LD : WIDE) / 4];  // keys, then values; before and after, queries and outputs on their way
  threadgroup float scores[PAIRS * SCORE_LD];
  threadgroup act probabilities[PAIRS * P_LD];
  threadgroup float decays[PAIRS];
  threadgroup float diagonal[4 * 64];  // of eight pairs' decays

  const uint heads = args.Hq / args.Hkv, pairs = step.rows * heads, begin = group.x * PAIRS;
  if (begin < pairs) {
    threadgroup act* kv = (threadgroup act*)tile;
    const uint last_row = (metal::min(begin + PAIRS, pairs) - 1u) / heads, last_key = step.position + last_row;
    const uint from = args.first_block * LILY_KV_BLOCK;
    const uint stop = args.key_blocks != 0u ? from + args.key_blocks * LILY_KV_BLOCK : 0xffffffffu;
    if (from <= last_key) {
      const uint p0 = sg / 2u * 8u, side = sg % 2u;  // this simdgroup's pairs, and its half of the keys and of D
      threadgroup float* own = (threadgroup float*)kv + sg * 8u * 36u;  // 8 x 32 of its output, on the way to or from device memory

      // queries: 8 pairs x D as fragments, through kv
      simdgroup_matrix<act, 8, 8> queries[D / 8u];
      for (uint part = 0; part < PAIRS; part += KEYS) {
        for (uint i = tid; i < KEYS * (D / 4u); i += THREADS) {
          const Pair p = pair_at(begin + part + i / (D / 4u), pairs, group.y, heads);
          device const act_pack* row = (device const act_pack*)(q + (ulong(p.row) * args.Hq + p.head) * D);
          ((threadgroup act_pack*)(kv + i / (D / 4u) * LD))[i % (D / 4u)] = row[i % (D / 4u)];
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
        if (p0 >= part && p0 < part + KEYS) {
          LILY_UNROLL for (uint d = 0; d < D / 8u; d++) simdgroup_load(queries[d], kv + (p0 - part) * LD + 8u * d, LD);
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
      }

      // the running maximum and sum of pair 4 sg + lane / 8, the same in its eight lanes
      const uint mine = 4u * sg + lane / 8u;
      const Pair self = pair_at(begin + mine, pairs, group.y, heads);
      const uint own_key = step.position + self.row;
      float m = minus_infinity(), l = 0.0f;
      simdgroup_matrix<float, 8, 8> o[TILES];
      LILY_UNROLL for (uint j = 0; j < TILES; j++) o[j] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
      if (from != 0u) {  // pairs past the end begin anew: what the last one handed on, it overwrites
        if (begin + mine < pairs) {
          device const float* ml = ml_part + (ulong(self.row) * args.Hq + self.head) * 2u;
          m = ml[0];
          l = ml[1];
        }
        LILY_UNROLL for (uint j = 0; j < TILES; j += 4u) {
          for (uint i = lane; i < 256u; i += 32u) {
            const uint pair = begin + p0 + i / 32u;
            const Pair p = pair_at(pair, pairs, group.y, heads);
            own[i / 32u * 36u + i % 32u] = pair < pairs ? o_part[(ulong(p.row) * args.Hq + p.head) * D + side * (D / 2u) + 8u * j + i % 32u] : 0.0f;
          }
          simdgroup_barrier(mem_flags::mem_threadgroup);
          LILY_UNROLL for (uint c = 0; c < 4u; c++) simdgroup_load(o[j + c], own + 8u * c, 36);
          simdgroup_barrier(mem_flags::mem_threadgroup);
        }
      }
      diagonal[tid] = 0.0f;

      for (uint block = from; block <= last_key && block < stop; block += BLOCK) {
        for (uint key = block; key < block + BLOCK && key <= last_key; key += KEYS) {
          threadgroup_barrier(mem_flags::mem_threadgroup);  // kv, scores and diagonal are free
          stage_rows<D, LD>(k_arena + arena_offset(args, table, key, group.y), KEYS, last_key - key + 1u, kv, tid);
          threadgroup_barrier(mem_flags::mem_threadgroup);
          LILY_UNROLL for (uint n = 0; n < KEYS / 16u; n++) {
            const uint column = side * (KEYS / 2u) + 8u * n;
            simdgroup_matrix<float, 8, 8> s = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
            LILY_UNROLL for (uint d = 0; d < D / 8u; d++) {
              simdgroup_matrix<act, 8, 8> k;
              simdgroup_load(k, kv + column * LD + 8u * d, LD, ulong2(0, 0), true);
              simdgroup_multiply_accumulate(s, queries[d], k, s);
            }
            simdgroup_store(s, scores + p0 * SCORE_LD + (key - block) + column, SCORE_LD);
          }
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);

        constexpr uint EACH = BLOCK / 8u;  // keys of a lane
        const uint k0 = lane % 8u * EACH;
        float s[EACH], highest = minus_infinity();
        LILY_UNROLL for (uint i = 0; i < EACH; i++) {
          s[i] = block + k0 + i <= own_key ? scores[mine * SCORE_LD + k0 + i] : minus_infinity();
          highest = metal::max(highest, s[i]);
        }
        highest = metal::max(highest, simd_shuffle_xor(highest, ushort(1)));
        highest = metal::max(highest, simd_shuffle_xor(highest, ushort(2)));
        highest = metal::max(highest, simd_shuffle_xor(highest, ushort(4)));
        const float now = metal::max(m, highest * args.scale), decay = metal::exp(m - now);
        float sum = 0.0f;
        LILY_UNROLL for (uint i = 0; i < EACH; i++) {
          const float p = metal::exp(s[i] * args.scale - now);
          sum += p;
          probabilities[mine * P_LD + k0 + i] = round_act(p);
        }
        sum += simd_shuffle_xor(sum, ushort(1));
        sum += simd_shuffle_xor(sum, ushort(2));
        sum += simd_shuffle_xor(sum, ushort(4));
        l = l * decay + sum;
        m = now;
        if (lane % 8u == 0u) {
          decays[mine] = decay;
          diagonal[mine / 8u * 64u + mine % 8u * 9u] = decay;
        }

        for (uint key = block; key < block + BLOCK && key <= last_key; key += KEYS) {
          if (key != block) threadgroup_barrier(mem_flags::mem_threadgroup);  // kv is free
          stage_rows<D, LD>(v_arena + arena_offset(args, table, key, group.y), KEYS, last_key - key + 1u, kv, tid);
          threadgroup_barrier(mem_flags::mem_threadgroup);
          // only where a maximum rose: times one would change no bit
          const bool rose = simd_any(decays[p0 + lane % 8u] != 1.0f);
          if (key == block && rose) {
            simdgroup_matrix<float, 8, 8> d;
            simdgroup_load(d, diagonal + p0 * 8u, 8);
            LILY_UNROLL for (uint j = 0; j < TILES; j++) {
              simdgroup_matrix<float, 8, 8> zero = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
              simdgroup_multiply_accumulate(o[j], d, o[j], zero);
            }
          }
          LILY_UNROLL for (uint kk = 0; kk < KEYS; kk += 8u) {
            simdgroup_matrix<act, 8, 8> p, v;
            simdgroup_load(p, probabilities + p0 * P_LD + (key - block) + kk, P_LD);
            LILY_UNROLL for (uint j = 0; j < TILES; j++) {
              simdgroup_load(v, kv + kk * LD + side * (D / 2u) + 8u * j, LD);
              simdgroup_multiply_accumulate(o[j], p, v, o[j]);
            }
          }
        }
      }

      const bool done = last_key < stop;
      simdgroup_barrier(mem_flags::mem_device);  // all eight lanes have read what one of them writes
      if (!done && lane % 8u == 0u && begin + mine < pairs) {
        device float* ml = ml_part + (ulong(self.row) * args.Hq + self.head) * 2u;
        ml[0] = m;
        ml[1] = l;
      }
      threadgroup_barrier(mem_flags::mem_threadgroup);
      if (lane % 8u == 0u) decays[mine] = 1.0f / l;
      threadgroup_barrier(mem_flags::mem_threadgroup);
      LILY_UNROLL for (uint j = 0; j < TILES; j += 4u) {
        LILY_UNROLL for (uint c = 0; c < 4u; c++) simdgroup_store(o[j + c], own + 8u * c, 36);
        simdgroup_barrier(mem_flags::mem_threadgroup);
        for (uint i = lane; i < 256u; i += 32u) {
          const uint pair = p0 + i / 32u, d = side * (D / 2u) + 8u * j + i % 32u;
          if (begin + pair < pairs) {
            const Pair p = pair_at(begin + pair, pairs, group.y, heads);
            const ulong to = (ulong(p.row) * args.Hq + p.head) * D + d;
            const float value = own[i / 32u * 36u + i % 32u];
            if (!done)
              o_part[to] = value;
            else if (args.gated != 0u)
              ((device act*)x)[to] = round_act(gated(value * decays[pair], qkv[ulong(p.row) * args.ld + gate_offset(args, p.head) + d]));
            else
              x[to] = value * decays[pair];
          }
        }
        simdgroup_barrier(mem_flags::mem_threadgroup);
      }
    }
  }
}

LILY_INSTANTIATE(attn_rows_d64, attn_rows, 64)
LILY_INSTANTIATE(attn_rows_d128, attn_rows, 128)
LILY_INSTANTIATE(attn_rows_d256, attn_rows, 256)
