// Reads and validates the arguments of tinygemm's product (bitport_shim.h).
#pragma once
#include "../kernels/bitport_kernels.h"
#include "../torch/tensors.h"
#include "bitport_shim.h"

namespace bitport {

struct Contract {
  View self, mat2, pairs;
  int64_t m = 0, n = 0, k = 0, inner = 0, group = 0;

  const char* read(AtenTensorHandle a, AtenTensorHandle b, int64_t given_group, AtenTensorHandle c) {
    if (!a) return "self is null";
    if (!b) return "mat2 is null";
    if (!c) return "scales_and_zeros is null";
    self = View(reinterpret_cast<TensorHandle>(a));
    mat2 = View(reinterpret_cast<TensorHandle>(b));
    pairs = View(reinterpret_cast<TensorHandle>(c));
    if (!self.ok) return "self is not a contiguous tensor on this device";
    if (!mat2.ok) return "mat2 is not a contiguous tensor on this device";
    if (!pairs.ok) return "scales_and_zeros is not a contiguous tensor on this device";
    if (self.type() != BITPORT_BF16) return "self must be bfloat16";
    if (mat2.dtype != torch.int32) return "mat2 must be int32";
    if (pairs.type() != BITPORT_BF16) return "scales_and_zeros must be bfloat16";
    if (self.dim != 2) return "self must have 2 dimensions, [m, k]";
    if (mat2.dim != 4) return "mat2 must have 4 dimensions, [n/8, k/(inner*16), 32, inner/2]";
    if (pairs.dim != 3) return "scales_and_zeros must have 3 dimensions, [k/group, n, 2]";
    const int64_t half = mat2.sizes[3];
    if (half != 1 && half != 2 && half != 4) return "the last dimension of mat2, inner/2, must be 1, 2 or 4";
    if (mat2.sizes[2] != 32) return "dimension 2 of mat2 must be 32";
    inner = 2 * half;
    m = self.sizes[0];
    k = self.sizes[1];
    group = given_group;
    if (group != 32 && group != 64 && group != 128 && group != 256) return "group must be 32, 64, 128 or 256";
    if (k < 1 || k % group) return "group must divide k, the columns of self";
    if (k % (16 * inner) || mat2.sizes[1] != k / (16 * inner)) return "dimension 1 of mat2 must be k / (inner*16)";
    n = 8 * mat2.sizes[0];   // no overflow: no other dimension of mat2 is 0, so that its rows lie in memory
    if (pairs.sizes[0] != k / group) return "dimension 0 of scales_and_zeros must be k / group";
    if (pairs.sizes[1] != n) return "dimension 1 of scales_and_zeros must be n, a multiple of 8: 8 * dimension 0 of mat2";
    if (pairs.sizes[2] != 2) return "dimension 2 of scales_and_zeros must be 2";
    return nullptr;
  }
};

}  // namespace bitport
