// Sixteen lanes in one of gcc's vectors: a register of AVX512, or whatever gcc makes of it on other processors.
#pragma once

#include <cstdint>

namespace PENSTOCK_LEVEL {

typedef float Floats __attribute__((vector_size(64), may_alias));
typedef int32_t Ints __attribute__((vector_size(64), may_alias));
typedef uint32_t Words __attribute__((vector_size(64), may_alias));
typedef float FloatsAnywhere __attribute__((vector_size(64), may_alias, aligned(4)));
typedef int32_t IntsAnywhere __attribute__((vector_size(64), may_alias, aligned(1)));

INLINE Floats splat(float x) { return x - Floats{}; }  // not 0 + x, which would turn -0 into 0
INLINE Ints splat_int(int32_t x) { return Ints{} + x; }
INLINE Floats load(const float* p) { return *reinterpret_cast<const FloatsAnywhere*>(p); }
INLINE void store(float* p, Floats x) { *reinterpret_cast<FloatsAnywhere*>(p) = x; }
INLINE Ints load_ints(const void* p) { return *reinterpret_cast<const IntsAnywhere*>(p); }
INLINE void store_ints(void* p, Ints x) { *reinterpret_cast<IntsAnywhere*>(p) = x; }
INLINE Floats as_floats(Ints x) { return reinterpret_cast<Floats>(x); }
INLINE Ints as_ints(Floats x) { return reinterpret_cast<Ints>(x); }
INLINE Ints as_ints(Words x) { return reinterpret_cast<Ints>(x); }
INLINE Words as_words(Ints x) { return reinterpret_cast<Words>(x); }
INLINE Floats where(Ints mask, Floats yes, Floats no) { return mask ? yes : no; }
INLINE Floats to_floats(Ints x) { return __builtin_convertvector(x, Floats); }

}  // namespace PENSTOCK_LEVEL
