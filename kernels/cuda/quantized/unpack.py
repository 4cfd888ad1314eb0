"""Converts codes into the numbers that are multiplied, inside a kernel."""

import triton
import triton.language as tl

# Four bytes become eight 16-bit floats. Each has the bits of a constant with the code in the lowest four bits: 128 +
# code in bfloat16, 1024 + code in float16. Adding $5 and $6 removes the constant and the zero point again.
_UNPACK = """{{
.reg .b32 low, high, magic, one;
mov.b32 magic, {magic};
mov.b32 one, {one};
and.b32 low, $4, 0x0f0f0f0f;
shr.u32 high, $4, 4;
and.b32 high, high, 0x0f0f0f0f;
prmt.b32 $0, low, magic, 0x4140;
prmt.b32 $1, low, magic, 0x4342;
prmt.b32 $2, high, magic, 0x4140;
prmt.b32 $3, high, magic, 0x4342;
fma.rn.{type} $0, $0, one, $5;
fma.rn.{type} $1, $1, one, $6;
fma.rn.{type} $2, $2, one, $5;
fma.rn.{type} $3, $3, one, $6;
}}"""
UNPACK_BF16 = tl.constexpr(_UNPACK.format(magic="0x43434343", one="0x3f803f80", type="bf16x2"))
UNPACK_FP16 = tl.constexpr(_UNPACK.format(magic="0x64646464", one="0x3c003c00", type="f16x2"))


@triton.jit
def unpacked_int4(codes, zeros, dtype: tl.constexpr):
    """Computes ``code - zero`` exactly, for the low and for the high four bits: two tensors (H, N) in ``dtype``, from
    ``codes`` (H, N) uint8 and ``zeros`` (N,) uint8.

    For 16-bit dtypes it takes few instructions for eight codes at a time. One by one, unpacking would take longer than
    reading the codes.
    """
    wide = zeros.to(tl.float32)
    if dtype == tl.float32:
        low = (codes & 15).to(tl.float32) - wide[None, :]
        high = (codes >> 4).to(tl.float32) - wide[None, :]
    else:
        back = (-wide - (128.0 if dtype == tl.bfloat16 else 1024.0)).to(dtype)
        low, high = tl.inline_asm_elementwise(
            UNPACK_BF16 if dtype == tl.bfloat16 else UNPACK_FP16,
            "=r,=r,=r,=r,r,r,r",
            [codes, back[None, :]],
            dtype=(back.dtype, back.dtype),
            is_pure=True,
            pack=4,
        )
    return low, high


@triton.jit
def unpacked(codes, dtype: tl.constexpr):
    """Converts signed bytes or float8_e4m3fn to ``dtype``, exactly. Floats are of ``dtype`` already."""
    if codes.dtype == tl.float8e4nv:
        # Via float32, since converting float16 to bfloat16 directly runs at a quarter of the speed.
        codes = codes.to(tl.float16).to(tl.float32)
    return codes.to(dtype)
