#include "matrices.h"

namespace mtp {

size_t group_bytes(const Matrix& matrix) {
    return matrix.kind == Kind::blocks ? static_cast<size_t>(matrix.blocks) * kBlockBytes
                                       : static_cast<size_t>((matrix.columns + 1) / 2) * 32;
}

int group_count(const Matrix& matrix) {
    const int together = matrix.kind == Kind::blocks ? kBlockGroup : kRotatedGroup;
    return (matrix.outputs + together - 1) / together;
}

}  // namespace mtp
