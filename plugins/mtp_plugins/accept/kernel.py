"""Accept on a GPU: one program for each sequence."""
# mypy: ignore-errors
# The body of a kernel is Triton's language, which has no types.

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["draft_tokens"])
def accept(
    draft_ptr,
    chosen_ptr,
    draft_tokens,
    accepted_ptr,
    accepted_rows_ptr,
    emitted_ptr,
    next_token_ptr,
    block: tl.constexpr,
):
    """See `OPERATOR` for shapes; block is a power of two above draft_tokens."""
    sequence = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, block)
    in_draft = i < draft_tokens
    in_chosen = i <= draft_tokens
    at = sequence * (draft_tokens + 1) + i
    draft = tl.load(draft_ptr + sequence * draft_tokens + i, mask=in_draft, other=0)
    chosen = tl.load(chosen_ptr + at, mask=in_chosen, other=0)
    # The first wrong token ends the prefix; entry draft_tokens ends it if none is wrong.
    accepted = tl.min(tl.where(in_draft & (draft == chosen), draft_tokens, i), axis=0)
    tl.store(accepted_ptr + sequence, accepted)
    tl.store(accepted_rows_ptr + sequence, accepted + 1)
    tl.store(emitted_ptr + at, tl.where(i <= accepted, chosen, 0), mask=in_chosen)
    tl.store(next_token_ptr + sequence, tl.sum(tl.where(i == accepted, chosen, 0), axis=0))
