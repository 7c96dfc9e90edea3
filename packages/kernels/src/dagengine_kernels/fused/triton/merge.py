"""The merge of partial results. Knows a plan's merge lists and LSE (base 2); not pages, not positions.

    program   one query head of one merge row; its parts, PARTS at a time, in the plan's order

Sinks enter here, once, for the rows that no work writes directly.
"""

import triton
import triton.language as tl

from dagengine_kernels.fused.triton.attend import with_sink


@triton.jit
def merge(
    o_part,
    lse2_part,
    rows,
    indptr,
    parts,
    out,
    lse2,
    sinks,
    HKV: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Merge row program_id(0), query head program_id(1) of its group.

    Args:
        o_part: float32 [.., GROUP, D]; lse2_part: float32 [.., GROUP], -inf where nothing was seen (o_part is
            not read there).
        rows, indptr, parts: merge_rows, merge_indptr, merge_parts of the plan.
        out: [T, Hkv * GROUP, D]; lse2: float32 [T, Hkv * GROUP]. Without parts: 0 and -inf, or the sink alone.
        sinks: float32 [Hkv * GROUP] logits, base e, or None.
    """
    j, g = tl.program_id(0), tl.program_id(1)
    begin, end = tl.load(indptr + j), tl.load(indptr + j + 1)
    d = tl.arange(0, BLOCK_D)
    top = -float("inf")
    total = 0.0
    acc = tl.zeros((BLOCK_D,), tl.float32)
    for i in range(begin, end, PARTS):
        at = i + tl.arange(0, PARTS)
        part = tl.load(parts + at, mask=at < end, other=0).to(tl.int64) * GROUP + g
        log_sums = tl.load(lse2_part + part, mask=at < end, other=-float("inf"))
        saw = log_sums > -float("inf")
        o = tl.load(o_part + part[:, None] * D + d[None, :], mask=saw[:, None] & (d < D)[None, :], other=0.0)
        new_top = tl.maximum(top, tl.max(log_sums, 0))
        base = tl.where(new_top == -float("inf"), 0.0, new_top)
        weights = tl.exp2(log_sums - base)
        shrink = tl.exp2(top - base)
        total = total * shrink + tl.sum(weights, 0)
        acc = acc * shrink + tl.sum(o * weights[:, None], 0)
        top = new_top
    divisor = tl.where(total > 0, total, 1.0)
    log_sum = tl.where(total > 0, top + tl.log2(divisor), -float("inf"))
    share = 1.0 / divisor
    row = tl.load(rows + j)
    q_head = (row % HKV) * GROUP + g
    if sinks is not None:
        log_sum, taken = with_sink(log_sum, tl.load(sinks + q_head))
        share = share * taken
    place = (row // HKV).to(tl.int64) * (HKV * GROUP) + q_head
    tl.store(lse2 + place, log_sum)
    tl.store(out + place * D + d, (acc * share).to(out.dtype.element_ty), mask=d < D)
