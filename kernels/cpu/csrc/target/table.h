// Defines the table of one instruction set. Included once by each file in target/ that defines PENSTOCK_LEVEL.
#pragma once

#include "core/kernel_table.h"

#include "core/simd.h"

#include "gemm/gemm.h"

#include "core/elementwise.h"

#include "attention/attention.h"

#include "recurrent/recurrent.h"

#include "sampling/sample.h"

namespace PENSTOCK_LEVEL {

static const penstock::Kernels TABLE = {
    PENSTOCK_LEVEL_NAME,
    panel_bytes, input_bytes, pack_panel, pack_panel_bf16, pack_panel_codes, unpack_row, prepare,
    product, product_rows,
    rms_norm, layer_norm, add, scale, soft_cap, gated, activated, multiply, multiply_sigmoid, convolve, scan_state,
    rotate, write_kv,
    attention_scratch, partial_floats, attend, merge,
    sampling_scratch, sample, logprobs,
};

}  // namespace PENSTOCK_LEVEL
