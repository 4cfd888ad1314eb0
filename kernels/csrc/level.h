// Makes the table of one instruction set. Included once by each level_*.cpp, which defines PENSTOCK_LEVEL.
#pragma once

#include "kernels.h"

#include "vec.h"

#include "products.h"

#include "elementwise.h"

#include "attention.h"

#include "sampling.h"

namespace PENSTOCK_LEVEL {

static const penstock::Kernels TABLE = {
    PENSTOCK_LEVEL_NAME,
    panel_bytes, input_bytes, pack_panel, pack_panel_bf16, pack_panel_codes, unpack_row, prepare,
    product, product_rows,
    rms_norm, add, scale, soft_cap, gated, rotate, write_kv,
    attention_scratch, partial_floats, attend, merge,
    sampling_scratch, sample, logprobs,
};

}  // namespace PENSTOCK_LEVEL
