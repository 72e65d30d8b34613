// The product behind simdgroup_multiply_accumulate: k ascending, one fused multiply-add each, from C.
#include "shim/matrix.hpp"

namespace lily_sim {

void multiply_8x8(Simd& simd) {
  float a[8][8], b[8][8], c[8][8];
  Place places[kSimdWidth];
  for (uint32_t i = 0; i < kSimdWidth; i++) {
    const Place p = places[i] = place_of(i);
    const Fragments& f = in<Fragments>(simd, i);
    for (uint32_t k = 0; k < 2; k++) {
      a[p.row][p.col + k] = f.a[k];
      b[p.row][p.col + k] = f.b[k];
      c[p.row][p.col + k] = f.c[k];
    }
  }
  for (int row = 0; row < 8; row++)
    for (int k = 0; k < 8; k++)
      for (int col = 0; col < 8; col++) c[row][col] = __builtin_fmaf(a[row][k], b[k][col], c[row][col]);
  for (uint32_t i = 0; i < kSimdWidth; i++) out<Fragment>(simd, i) = {{c[places[i].row][places[i].col], c[places[i].row][places[i].col + 1]}};
}

}  // namespace lily_sim
