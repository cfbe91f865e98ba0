#include "matrices.h"

namespace mtp {

const Matrix* held_matrix(int64_t address) {
    const Matrix* matrix = reinterpret_cast<const Matrix*>(address);
    return Arena::hold(matrix) ? matrix : nullptr;
}

int group_size(const Matrix& matrix) {
    switch (matrix.kind) {
        case Kind::blocks: return matrix.used == Instructions::vnni ? kWideBlockGroup : kBlockGroup;
        case Kind::rotated: return kRotatedGroup;
        default: return kWholeGroup;
    }
}

int group_count(const Matrix& matrix) {
    const int together = group_size(matrix);
    return (matrix.outputs + together - 1) / together;
}

size_t group_bytes(const Matrix& matrix) {
    switch (matrix.kind) {
        case Kind::blocks: return static_cast<size_t>(matrix.blocks) * kBlockBytes * group_size(matrix);
        case Kind::rotated: return static_cast<size_t>((matrix.columns + 1) / 2) * 2 * kRotatedGroup;
        default: return static_cast<size_t>(matrix.columns) * kWholeGroup * sizeof(float);
    }
}

}  // namespace mtp
