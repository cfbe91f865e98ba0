// What processors can do beyond AVX2. Results are the same bits with any of it: integers are summed exactly.
#pragma once

// For functions that multiply 8-bit integers in one instruction (VNNI), in registers of 64 bytes. Only such functions,
// and nothing of the standard library, may be compiled so: the linker keeps one copy of an inline function for all.
#define MTP_VNNI __attribute__((target("avx2,fma,avx512f,avx512bw,avx512vl,avx512vnni")))

namespace mtp {

enum class Instructions : int { avx2 = 0, vnni = 1 };

// What this processor can do, of those.
Instructions best_instructions();

}  // namespace mtp
