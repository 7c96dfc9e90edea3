"""The walk over a plan: one program per work, for decode and prefill alike. Knows the plan's arrays and pages.

    program   one query tile (up to M rows of one kv head) x a stretch of its KV tiles
    pieces    of that stretch, each of one run and one kind (pieces.py); q is turned once per run

    kind      whole pages?   every row sees every token?
    SEEN      yes            yes                            no masks
    WHOLE     yes            no                             a row mask on the scores
    RAGGED    no             no                             that, and V's rows outside LO..HI are zeroed

Scores are in the exp2 domain: q is multiplied by scale * log2(e) when it is turned, so m, l and LSE are base 2.
Products of float32 are made of three TF32 products each (errors of 1e-6).
"""

import triton
import triton.language as tl

from dagengine_kernels.fused.triton.rotate import load_move, load_turned, move_keys

SEEN = tl.constexpr(0)
WHOLE = tl.constexpr(1)
RAGGED = tl.constexpr(2)

LOG2E = tl.constexpr(1.4426950408889634)
NEVER = tl.constexpr(2**31 - 1)
INVISIBLE = tl.constexpr(-(2**31))


@triton.jit
def load_tile(
    kv,
    pages,
    entries,
    tile,
    head,
    KIND: tl.constexpr,
    HKV: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PAGE: tl.constexpr,
    BOXES: tl.constexpr,
    N: tl.constexpr,
):
    """A KV tile: K and V [N, BLOCK_D], stored positions [N].

    Outside LO..HI V is 0, the stored position is NEVER, and K may be anything, NaN included.
    """
    n = tl.arange(0, N)
    entry = entries + tile * (BOXES * 4)
    inside = n < BOXES * PAGE
    if pages is not None:
        row = (tl.load(entry) * (2 * HKV) + head) * PAGE
        k = pages.load([row, 0])
        v = pages.load([row + HKV * PAGE, 0])
        stored = tl.load(entry + 2) + n
        if KIND == RAGGED:
            rows = tl.load(entry + 1)
            inside = (n >= (rows & 0xFFFF)) & (n < (rows >> 16))
    else:
        d = tl.arange(0, BLOCK_D)
        box = tl.minimum(n // PAGE, BOXES - 1) * 4
        row = n % PAGE
        # Of a null entry page 0 is read and nothing used.
        page = tl.maximum(tl.load(entry + box), 0).to(tl.int64)
        at = kv + ((page * (2 * HKV) + head) * PAGE + row)[:, None] * D + d[None, :]
        if D < BLOCK_D:
            k = tl.load(at, mask=(d < D)[None, :], other=0.0)
            v = tl.load(at + HKV * PAGE * D, mask=(d < D)[None, :], other=0.0)
        else:
            k = tl.load(at)
            v = tl.load(at + HKV * PAGE * D)
        stored = tl.load(entry + box + 2) + row
        if KIND == RAGGED:
            rows = tl.load(entry + box + 1)
            inside = inside & (row >= (rows & 0xFFFF)) & (row < (rows >> 16))
    if KIND == RAGGED or BOXES * PAGE < N:
        v = tl.where(inside[:, None], v, 0.0)
        stored = tl.where(inside, stored, NEVER)
    return k, v, stored


@triton.jit
def walk(
    q,
    eff,
    delta,
    top,
    total,
    acc,
    begin,
    end,
    kv,
    pages,
    entries,
    head,
    cos,
    sin,
    scaling,
    cap2,
    KIND: tl.constexpr,
    HKV: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PAGE: tl.constexpr,
    BOXES: tl.constexpr,
    N: tl.constexpr,
    HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    TURN_KEYS: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """KV tiles begin..end-1, all of one kind, into the running top [M], total [M] and acc [M, BLOCK_D]."""
    if TURN_KEYS and HALF > 0:
        move_cos, move_sin = load_move(cos, sin, delta, scaling, HALF)
    if UPCAST:
        q = q.to(tl.float32)
    for tile in tl.range(begin, end):
        k, v, stored = load_tile(kv, pages, entries, tile, head, KIND, HKV, D, BLOCK_D, PAGE, BOXES, N)
        if TURN_KEYS and HALF > 0:
            k = move_keys(k, move_cos, move_sin, N, HALF, INTERLEAVED).to(v.dtype)
        if UPCAST:
            k, v = k.to(tl.float32), v.to(tl.float32)
        scores = tl.dot(q, tl.trans(k), input_precision="tf32x3")
        if SOFTCAP:
            # tanh(x) = 1 - 2 / (exp(2x) + 1); the scores come divided by the cap.
            scores = cap2 * (1.0 - 2.0 / (tl.exp2(scores * (2 * LOG2E)) + 1.0))
        if KIND != SEEN or BOXES * PAGE < N:
            sees = stored[None, :] <= eff[:, None]
            if WINDOW > 0:
                sees = sees & (stored[None, :] > eff[:, None] - WINDOW)
            scores = tl.where(sees, scores, -float("inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        base = new_top if KIND == SEEN else tl.where(new_top == -float("inf"), 0.0, new_top)
        weights = tl.exp2(scores - base[:, None])
        shrink = tl.exp2(top - base)
        total = total * shrink + tl.sum(weights, 1)
        acc = tl.dot(weights.to(v.dtype), v, acc * shrink[:, None], input_precision="tf32x3")
        top = new_top
    return top, total, acc


@triton.jit
def tile_slots(
    rows, head, slots: tl.constexpr, HKV: tl.constexpr, GROUP: tl.constexpr, BLOCK_M: tl.constexpr
):
    """Of the rows of a query tile [M]: table row, slot, head among all rows' heads, and whether it is stored.

    Padding does as row 0 does, and is not stored. The load is volatile so that it is done where this is called:
    what follows from it would cost registers in the walk.
    """
    m = tl.arange(0, BLOCK_M)
    slot = m // GROUP
    row = tl.load(rows + slot, mask=slot < slots, other=-1, volatile=True)
    real = row >= 0
    row = tl.maximum(row, 0)
    return row, slot, row.to(tl.int64) * (HKV * GROUP) + head * GROUP + m % GROUP, real


@triton.jit
def attend(
    q,
    kv,
    pages,
    cos,
    sin,
    positions,
    works,
    pieces,
    tile_rows,
    entries,
    deltas,
    out,
    lse2,
    o_part,
    lse2_part,
    sinks,
    q_factor,
    cap2,
    scaling,
    last_position,
    HKV: tl.constexpr,
    GROUP: tl.constexpr,
    M: tl.constexpr,
    BLOCK_M: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PAGE: tl.constexpr,
    BOXES: tl.constexpr,
    N: tl.constexpr,
    HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    TURN_KEYS: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """One work.

    Args:
        q: [T, Hkv * GROUP, D] unrotated. kv: [pages, 2, Hkv, PAGE, D]. pages: the same as a descriptor of
            [pages * 2 * Hkv * PAGE, D] in blocks of [PAGE, BLOCK_D]; None where a tile is not one page.
        cos, sin: as rotate.py says, None if HALF is 0; last_position: theirs; scaling: their attention scaling.
        positions: int32 [T] view positions.
        works: int32 [W, 5], pieces: int32 [P, 6], see pieces.py.
        tile_rows, entries, deltas: as plan.py says.
        out: [T, Hkv * GROUP, D]; lse2: float32 [T, Hkv * GROUP]; written where PART is -1.
        o_part: float32 [.., GROUP, D]; lse2_part: float32 [.., GROUP]; written elsewhere.
        sinks: float32 [Hkv * GROUP] logits, base e, or None.
        q_factor: scale * log2(e), or scale / cap. cap2: cap * log2(e), if SOFTCAP.
        UPCAST: multiply in float32, for the interpreter.
    """
    work = works + tl.program_id(0) * 5
    query_tile, head = tl.load(work), tl.load(work + 1)
    first, last, part = tl.load(work + 2), tl.load(work + 3), tl.load(work + 4)

    slots: tl.constexpr = M // GROUP
    rows = tile_rows + query_tile * slots
    dtype = q.dtype.element_ty

    top = tl.full((BLOCK_M,), -float("inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    for i in range(first, last):
        piece = pieces + i * 6
        delta, vec = tl.load(piece), tl.load(piece + 1)
        begin, end, kind = tl.load(piece + 2), tl.load(piece + 3), tl.load(piece + 4)
        row, slot, place, _ = tile_slots(rows, head, slots, HKV, GROUP, BLOCK_M)
        position = tl.load(positions + row)
        listed = tl.where(slot < slots, vec, -1)
        own = tl.load(deltas + listed + slot, mask=listed >= 0, other=delta)
        # -1 is before every stored position.
        eff = tl.where(own == INVISIBLE, -1, tl.maximum(position - own, -1))
        at = position if TURN_KEYS else tl.minimum(tl.maximum(eff, 0), last_position)
        left, right = load_turned(q + place * D, None, cos, sin, at, D, BLOCK_D // 2, HALF, INTERLEAVED)
        both = tl.join((left * q_factor).to(dtype), (right * q_factor).to(dtype))
        turned = tl.reshape(tl.permute(both, (0, 2, 1)), (BLOCK_M, BLOCK_D))
        if kind == SEEN:
            top, total, acc = walk(
                turned, eff, delta, top, total, acc, begin, end, kv, pages, entries, head, cos, sin, scaling, cap2,
                SEEN, HKV, D, BLOCK_D, PAGE, BOXES, N, HALF, INTERLEAVED, WINDOW, SOFTCAP, TURN_KEYS, UPCAST,
            )  # fmt: skip
        elif kind == WHOLE:
            top, total, acc = walk(
                turned, eff, delta, top, total, acc, begin, end, kv, pages, entries, head, cos, sin, scaling, cap2,
                WHOLE, HKV, D, BLOCK_D, PAGE, BOXES, N, HALF, INTERLEAVED, WINDOW, SOFTCAP, TURN_KEYS, UPCAST,
            )  # fmt: skip
        else:
            top, total, acc = walk(
                turned, eff, delta, top, total, acc, begin, end, kv, pages, entries, head, cos, sin, scaling, cap2,
                RAGGED, HKV, D, BLOCK_D, PAGE, BOXES, N, HALF, INTERLEAVED, WINDOW, SOFTCAP, TURN_KEYS, UPCAST,
            )  # fmt: skip

    _, slot, place, real = tile_slots(rows, head, slots, HKV, GROUP, BLOCK_M)
    q_head = head * GROUP + tl.arange(0, BLOCK_M) % GROUP
    d = tl.arange(0, BLOCK_D)
    inside = real[:, None] & (d < D)[None, :]
    saw = total > 0
    divisor = tl.where(saw, total, 1.0)
    log_sum = tl.where(saw, top + tl.log2(divisor), -float("inf"))
    if part >= 0:
        partial = (part + slot).to(tl.int64) * GROUP + tl.arange(0, BLOCK_M) % GROUP
        tl.store(lse2_part + partial, log_sum, mask=real)
        tl.store(o_part + partial[:, None] * D + d[None, :], acc / divisor[:, None], mask=inside)
    else:
        share = 1.0 / divisor
        if sinks is not None:
            log_sum, taken = with_sink(log_sum, tl.load(sinks + q_head))
            share = share * taken
        tl.store(lse2 + place, log_sum, mask=real)
        tl.store(out + place[:, None] * D + d[None, :], (acc * share[:, None]).to(dtype), mask=inside)


@triton.jit
def with_sink(log_sum, sink):
    """lse2 with a sink's logit (base e) in it, and the share that is left to what was there before."""
    sink2 = sink * LOG2E
    high = tl.maximum(log_sum, sink2)
    high = tl.where(high == float("-inf"), 0.0, high)
    joint = high + tl.log2(tl.exp2(log_sum - high) + tl.exp2(sink2 - high))
    return joint, tl.where(joint == float("-inf"), 0.0, tl.exp2(log_sum - joint))
