#include "processor.h"

namespace mtp {

Instructions best_instructions() {
    const bool vnni = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vnni");
    return vnni ? Instructions::vnni : Instructions::avx2;
}

}  // namespace mtp
