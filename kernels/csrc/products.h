#pragma once
namespace PENSTOCK_LEVEL {
using namespace penstock;
static int64_t panel_bytes(Format, int, int) { return 0; }
static int64_t input_bytes(Format, int, int) { return 0; }
static void pack_panel(Format, int, int, const float* const*, uint8_t*, double*) {}
static void pack_panel_bf16(int, const uint16_t* const*, uint8_t*) {}
static void pack_panel_codes(Format, int, int, const uint8_t* const*, const float* const*, const float* const*, uint8_t*) {}
static void unpack_row(const Matrix&, int, float*) {}
static void prepare(Format, int, int, const float*, uint8_t*) {}
static void product(const Matrix&, const Inputs&, int, int, const Output&) {}
}
