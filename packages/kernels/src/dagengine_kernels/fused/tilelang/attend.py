"""The walk of a fused plan in TileLang for sm_90a: one kernel for decode over shared reads and for prefill.

Knows the arrays of a plan (fused/plan.py) and nothing of how they came about. One CTA does one work.

    warpgroup    0               1               last
    role         consumer 0      consumer 1      producer (one warp of it: TMA of K and V into a ring)
    rows         0..63           64..127         (a height of 64 has one consumer)

    consumer k   | QK(k) ......| softmax(k) .............| QK(k+1) ...
                 | PV(k-1) ............|                 | PV(k) ......
                 tensor cores          the other consumer's turn: named barriers pass it

A consumer turns its rows of q into shared memory at the first KV tile and at every new run, at the view position
minus the run's delta. Scores are masked only on tiles that need it, row by row; V rows outside LO..HI-1 become
zeros there, because 0 * NaN is NaN. The two consumers may both write these zeros: they write the same.
The softmax is in base 2 and float32; a row that has seen nothing has m = EMPTY and l = 0. Row sums are stored to Pin,
which nothing reads, before the wait for PV(k-1): ptxas moves that wait ahead of arithmetic, but not of a store.
"""

import math
from typing import Any

import tilelang.language as T
from tilelang.layout import make_swizzled_layout
from tvm import tirx

from dagengine_kernels.fused.plan import (
    ENTRY_PAGE,
    ENTRY_POS0,
    ENTRY_ROWS,
    ENTRY_RUN,
    RUN_DELTA,
    RUN_VEC,
    WORK_BEGIN,
    WORK_END,
    WORK_HEAD,
    WORK_PART,
    WORK_TILE,
)
from dagengine_kernels.fused.tilelang.variant import FARTHEST, PAGE_SIZE, Variant

EMPTY = -1e30
EVERYWHERE = FARTHEST
"""The visible end of a row that pads a tile: it is masked nowhere, and never written."""

WHOLE = PAGE_SIZE << 16
"""The ROWS of an entry whose page is read from end to end."""

PING, TURN = 1, 3
"""First named barriers: of the consumers' turns on the tensor cores, of one consumer's own threads."""


def attend_func(v: Variant) -> Any:
    """The TileLang function of a variant.

    Its arguments, in order (Hkv, T and the sizes of the tables are those of the tensors):
        q [T, Hkv, G, D], kv [pages, 2, Hkv, 64, D]: of the variant's dtype.
        rope float32 [L, max(R, 2)], (cos, sin) after (cos, sin); positions int32 [T]; step int32 [1], added to each.
        entries [E, 4], runs [R, 2], deltas [V], tile_rows [tiles, M // G], works [W, 5]: int32, as in a plan.
        sinks2 float32 [Hkv, G], in base 2; -inf for none.
        out [T, Hkv, G, D], lse2 float32 [T, Hkv, G], o_part float32 [P, G, D], lse2_part float32 [P, G].
        scale2 float32: what brings q . k to base 2; with a soft cap, to 2 log2(e) times the argument of the tanh.
        cap2 float32: the soft cap in base 2. window int32.
    """
    dtype, dim, group = v.dtype, v.head_dim, v.group
    boxes, stages, consumers, rows = v.boxes, v.stages, v.consumers, v.rows_per_tile
    keys = boxes * PAGE_SIZE
    blocks = dim // 64
    slots = rows // group
    half = v.rotary_dim // 2
    pairs = max(half, 1)
    width = math.gcd(half, 8) if half else 8
    items = dim // (2 * width)
    turned_items = half // width
    abreast = 128 // items
    batch = 1 if keys * dim > 8192 else 2
    chunk_rows = 128 // (dim // 8)
    consumer_threads = 128 * consumers
    policy = T.GemmWarpPolicy.FullRow
    accum = "float32"

    tokens, heads, pages = T.dynamic("tokens, heads, pages")
    num_entries, num_runs, num_deltas = T.dynamic("num_entries, num_runs, num_deltas")
    num_tiles, num_works, num_parts, length = T.dynamic("num_tiles, num_works, num_parts, length")

    @T.macro
    def produce(KV, Entries, Works, work, Ks, Vs, k_ready, k_free, v_ready, v_free):
        head = Works[work, WORK_HEAD]
        begin = Works[work, WORK_BEGIN]
        count = Works[work, WORK_END] - begin
        for k in T.serial(count):
            T.mbarrier_wait_parity(k_free[k % stages], ((k // stages) % 2) ^ 1)
            for b in T.unroll(boxes):
                for c in T.unroll(blocks):
                    T.tma_copy(
                        KV[Entries[(begin + k) * boxes + b, ENTRY_PAGE], 0, head, 0:64, c * 64 : c * 64 + 64],
                        Ks[k % stages, c, b * 64 : b * 64 + 64, :],
                        barrier=k_ready[k % stages],
                    )
            T.mbarrier_arrive(k_ready[k % stages])
            T.mbarrier_wait_parity(v_free[k % stages], ((k // stages) % 2) ^ 1)
            for b in T.unroll(boxes):
                T.tma_copy(
                    KV[Entries[(begin + k) * boxes + b, ENTRY_PAGE], 1, head, 0:64, :],
                    Vs[k % stages, b, :, :],
                    barrier=v_ready[k % stages],
                )
            T.mbarrier_arrive(v_ready[k % stages])

    @T.macro
    def open_rows(tx, tile, TileRows, RowOf):
        """The table row of each row of the tile, -1 where it pads."""
        if tx % 128 < 64:
            m = tx // 128 * 64 + tx % 128
            if m < slots * group:
                RowOf[m] = TileRows[tile, m // group]
            else:
                RowOf[m] = -1

    @T.macro
    def foresee_run(run, Runs, ahead):
        for f in T.vectorized(2):
            ahead[f] = Runs[run, f]

    @T.macro
    def foresee_delta(tx, Deltas, ahead, delta):
        """The delta of row tx of a warpgroup (two threads know each)."""
        delta[0] = ahead[RUN_DELTA]
        if ahead[RUN_VEC] >= 0:
            delta[0] = Deltas[T.min(ahead[RUN_VEC] + (tx // 128 * 64 + tx % 64) // group, num_deltas - 1)]

    @T.macro
    def look(tx, Positions, Step, RowOf, Ends, delta):
        """Ends: the last stored position that each row of this consumer may see in a run."""
        if tx % 128 < 64:
            m = tx // 128 * 64 + tx % 128
            if RowOf[m] < 0:
                Ends[m] = EVERYWHERE
            else:
                if delta[0] <= -EVERYWHERE:
                    Ends[m] = -1
                else:
                    Ends[m] = Positions[RowOf[m]] + Step[0] - delta[0]
        T.sync_threads(TURN + tx // 128, 128)

    @T.macro
    def clear_rows(tx, Qs):
        """Zeros in this consumer's rows of q: rows that pad, or see nothing yet, are multiplied too."""
        for c in T.unroll(blocks):
            for p in T.unroll(4):
                for e in T.vectorized(8):
                    Qs[c, tx // 128 * 64 + p * 16 + tx % 128 // 8, tx % 8 * 8 + e] = T.cast(0, dtype)
        T.sync_threads(TURN + tx // 128, 128)

    @T.macro
    def turn_item(n, x, cs):
        for e in T.unroll(width):
            first = T.cast(x[n, 2 * e if v.interleaved else e], accum)
            second = T.cast(x[n, 2 * e + 1 if v.interleaved else width + e], accum)
            x[n, 2 * e if v.interleaved else e] = T.cast(
                first * cs[n, 2 * e] - second * cs[n, 2 * e + 1], dtype
            )
            x[n, 2 * e + 1 if v.interleaved else width + e] = T.cast(
                second * cs[n, 2 * e] + first * cs[n, 2 * e + 1], dtype
            )

    def shows(RowOf, Ends, base):
        """Whether one of a batch of rows sees something of the run. Without positions each row is placed, once."""
        batched = [base + n * abreast for n in range(batch)]
        return tirx.any(*[tirx.all(RowOf[m] >= 0, Ends[m] >= 0) if half else RowOf[m] >= 0 for m in batched])

    @T.macro
    def place(tx, turns, a_at, b_at, head, Q, Rope, Qs, RowOf, Ends, x, cs):
        """A thread's items of this consumer's rows into shared memory, turned to Ends (p - delta) or as they are.

        Rows that see nothing of the run stay as they were. `batch` rows at a time: their loads are under way together.
        """
        for p in T.unroll(64 // abreast // batch):
            base = tx // 128 * 64 + p * batch * abreast + tx % 128 // items
            if shows(RowOf, Ends, base):
                for n in T.unroll(batch):
                    m = base + n * abreast
                    for e in T.vectorized(width):
                        x[n, e] = Q[T.max(RowOf[m], 0), head, m % group, a_at + e]
                    for e in T.vectorized(width):
                        x[n, width + e] = Q[T.max(RowOf[m], 0), head, m % group, b_at + e]
                    if turns:
                        at = T.max(T.min(Ends[m], length - 1), 0)
                        for e in T.vectorized(2 * width):
                            cs[n, e] = Rope[at, tx % items * 2 * width + e]
                for n in T.unroll(batch):
                    m = base + n * abreast
                    if turns:
                        turn_item(n, x, cs)
                    for e in T.vectorized(width):
                        Qs[a_at // 64, m, a_at % 64 + e] = x[n, e]
                    for e in T.vectorized(width):
                        Qs[b_at // 64, m, b_at % 64 + e] = x[n, width + e]

    @T.macro
    def turn(tx, head, Q, Rope, Qs, RowOf, Ends, x, cs):
        """`place` of the items of a thread: `width` pairs, or 2 * width elements that do not turn."""
        c = tx % items
        if turned_items > 0:
            if turned_items == items or c < turned_items:
                if v.interleaved:
                    place(
                        tx, True, c * 2 * width, c * 2 * width + width, head, Q, Rope, Qs, RowOf, Ends, x, cs
                    )
                else:
                    place(tx, True, c * width, half + c * width, head, Q, Rope, Qs, RowOf, Ends, x, cs)
        if turned_items < items:
            if turned_items == 0 or c >= turned_items:
                place(tx, False, c * 2 * width, c * 2 * width + width, head, Q, Rope, Qs, RowOf, Ends, x, cs)
        T.fence_proxy_async()
        T.sync_threads(TURN + tx // 128, 128)

    @T.macro
    def hold(tx, Ends, ends, limits):
        """Ends of this thread's rows in registers, and the lowest and highest of them."""
        for i in T.Parallel(rows):
            ends[i] = Ends[i]
        at = tx // 32 * 16 + tx % 32 // 4
        limits[0] = T.min(Ends[at], Ends[at + 8])
        limits[1] = T.max(Ends[at], Ends[at + 8])

    @T.macro
    def fetch(k, begin, count, Entries, entry, coming):
        """The entries of KV tile k, and on their way those of the next."""
        for f in T.unroll(4 * boxes):
            entry[f] = coming[f]
        for b in T.unroll(boxes):
            for f in T.vectorized(4):
                coming[4 * b + f] = Entries[(begin + T.min(k + 1, count - 1)) * boxes + b, f]

    @T.macro
    def issue_scores(stage, Qs, Ks, acc_s):
        for c in T.unroll(blocks):
            T.wgmma_gemm(
                Qs[c, :, :], Ks[stage, c, :, :], acc_s, transpose_B=True, policy=policy, clear_accum=(c == 0)
            )

    @T.macro
    def issue_values(stage, p0, p1, Vs, acc_o):
        T.wgmma_gemm(p0, Vs[stage, 0, :, :], acc_o, policy=policy, clear_accum=False)
        if boxes == 2:
            T.wgmma_gemm(p1, Vs[stage, 1, :, :], acc_o, policy=policy, clear_accum=False)

    @T.macro
    def mask_box(b, entry, ends, start, stop, acc_s, window):
        for i in T.Parallel(rows):
            stop[i] = T.min(entry[4 * b + ENTRY_ROWS] >> 16, ends[i] - entry[4 * b + ENTRY_POS0] + 1)
            start[i] = entry[4 * b + ENTRY_ROWS] & 65535
            if v.windowed:
                start[i] = T.max(start[i], ends[i] - window - entry[4 * b + ENTRY_POS0] + 1)
        for i, j in T.Parallel(rows, PAGE_SIZE):
            if (j < start[i]) or (j >= stop[i]):
                acc_s[i, 64 * b + j] = -T.infinity(accum)

    @T.macro
    def mask(entry, limits, ends, start, stop, acc_s, window):
        """-inf where a row must not look: outside LO..HI-1, behind its end, out of its window."""
        ragged = (entry[ENTRY_ROWS] != WHOLE) or (entry[4 * (boxes - 1) + ENTRY_ROWS] != WHOLE)
        late = T.max(entry[ENTRY_POS0], entry[4 * (boxes - 1) + ENTRY_POS0]) + (PAGE_SIZE - 1) > limits[0]
        early = T.min(entry[ENTRY_POS0], entry[4 * (boxes - 1) + ENTRY_POS0]) <= limits[1] - window
        if ragged or late or (early if v.windowed else False):
            mask_box(0, entry, ends, start, stop, acc_s, window)
            if boxes == 2:
                mask_box(1, entry, ends, start, stop, acc_s, window)

    @T.macro
    def clean(tx, stage, parity, entry, bounds, Vs, v_ready):
        """Zeros in the V rows that are not the tile's, whatever lies there."""
        for b in T.unroll(boxes):
            if entry[4 * b + ENTRY_ROWS] != WHOLE:
                T.mbarrier_wait_parity(v_ready[stage], parity)
                bounds[0] = entry[4 * b + ENTRY_ROWS] & 65535
                bounds[1] = entry[4 * b + ENTRY_ROWS] >> 16
                for p in T.serial(64 // chunk_rows):
                    bounds[2] = p * chunk_rows + tx % 128 // (dim // 8)
                    bounds[3] = T.if_then_else(
                        bounds[2] < bounds[0], 1, T.if_then_else(bounds[2] < bounds[1], 0, 1)
                    )
                    if bounds[3] > 0:
                        for e in T.vectorized(8):
                            Vs[stage, b, p * chunk_rows + tx % 128 // (dim // 8), tx % (dim // 8) * 8 + e] = (
                                T.cast(0, dtype)
                            )
                T.fence_proxy_async()
                T.sync_threads(TURN + tx // 128, 128)

    @T.macro
    def softmax(acc_s, m, m_before, alpha, total, row_sum, factor, grew):
        T.copy(m, m_before)
        T.reduce_max(acc_s, m, dim=1, clear=False)
        grew[0] = 0
        for i in T.Parallel(rows):
            grew[0] = T.max(grew[0], T.if_then_else(m[i] > m_before[i], 1, 0))
        for i in T.Parallel(rows):
            alpha[i] = T.exp2((m_before[i] - m[i]) * factor)
        for i, j in T.Parallel(rows, keys):
            acc_s[i, j] = T.exp2(acc_s[i, j] * factor - m[i] * factor)
        T.reduce_sum(acc_s, row_sum, dim=1)
        for i in T.Parallel(rows):
            total[i] = total[i] * alpha[i] + row_sum[i]

    @T.macro
    def squash(acc_s, scale2):
        """tanh(s * scale) by exp2: the hardware's tanh is good to 11 bits only."""
        for i, j in T.Parallel(rows, keys):
            acc_s[i, j] = 1.0 - 2.0 / (1.0 + T.exp2(acc_s[i, j] * scale2))

    @T.macro
    def pack(acc_s, p0, p1):
        for i, j in T.Parallel(rows, 64):
            p0[i, j] = acc_s[i, j]
        if boxes == 2:
            for i, j in T.Parallel(rows, 64):
                p1[i, j] = acc_s[i, j + 64]

    @T.macro
    def my_turn(tx):
        if v.pingpong:
            T.sync_threads(PING + tx // 128, 256)

    @T.macro
    def your_turn(tx):
        if v.pingpong:
            T.named_barrier_arrive(PING + 1 - tx // 128, 256)

    @T.macro
    def write_part(part, acc_o, m, total, alpha, factor, RowOf, OPart, Lse2Part):
        for i in T.Parallel(rows):
            alpha[i] = T.if_then_else(total[i] > 0, 1.0 / total[i], 0.0)
        for i in T.Parallel(rows):
            if RowOf[i] >= 0:
                Lse2Part[part + i // group, i % group] = T.if_then_else(
                    total[i] > 0, m[i] * factor + T.log2(total[i]), -T.infinity(accum)
                )
        for i, j in T.Parallel(rows, dim):
            if RowOf[i] >= 0:
                OPart[part + i // group, i % group, j] = acc_o[i, j] * alpha[i]

    @T.macro
    def write_out(head, acc_o, m, total, alpha, top, sink, factor, Sinks2, RowOf, Out, Lse2):
        for i in T.Parallel(rows):
            sink[i] = Sinks2[head, i % group]
            m[i] = T.if_then_else(total[i] > 0, m[i] * factor, EMPTY)
            top[i] = T.max(m[i], sink[i])
            alpha[i] = T.exp2(m[i] - top[i])
            total[i] = total[i] * alpha[i] + T.exp2(sink[i] - top[i])
            alpha[i] = T.if_then_else(total[i] > 0, alpha[i] / total[i], 0.0)
        for i in T.Parallel(rows):
            if RowOf[i] >= 0:
                Lse2[RowOf[i], head, i % group] = T.if_then_else(
                    total[i] > 0, top[i] + T.log2(total[i]), -T.infinity(accum)
                )
        for i, j in T.Parallel(rows, dim):
            if RowOf[i] >= 0:
                Out[RowOf[i], head, i % group, j] = T.cast(acc_o[i, j] * alpha[i], dtype)

    @T.prim_func
    def attend(
        Q: T.Tensor([tokens, heads, group, dim], dtype),
        KV: T.Tensor([pages, 2, heads, PAGE_SIZE, dim], dtype),
        Rope: T.Tensor([length, 2 * pairs], accum),
        Positions: T.Tensor([tokens], "int32"),
        Step: T.Tensor([1], "int32"),
        Entries: T.Tensor([num_entries, 4], "int32"),
        Runs: T.Tensor([num_runs, 2], "int32"),
        Deltas: T.Tensor([num_deltas], "int32"),
        TileRows: T.Tensor([num_tiles, slots], "int32"),
        Works: T.Tensor([num_works, 5], "int32"),
        Sinks2: T.Tensor([heads, group], accum),
        Out: T.Tensor([tokens, heads, group, dim], dtype),
        Lse2: T.Tensor([tokens, heads, group], accum),
        OPart: T.Tensor([num_parts, group, dim], accum),
        Lse2Part: T.Tensor([num_parts, group], accum),
        scale2: T.float32,
        cap2: T.float32,
        window: T.int32,
    ):
        with T.Kernel(num_works, threads=v.threads) as work:
            Qs = T.alloc_shared([blocks, rows, 64], dtype)
            Ks = T.alloc_shared([stages, blocks, keys, 64], dtype)
            Vs = T.alloc_shared([stages, boxes, PAGE_SIZE, dim], dtype)
            RowOf = T.alloc_shared([rows], "int32")
            Ends = T.alloc_shared([rows], "int32")
            Pin = T.alloc_shared([rows], accum)
            T.annotate_layout(
                {
                    Qs: make_swizzled_layout(Qs),
                    Ks: make_swizzled_layout(Ks),
                    Vs: make_swizzled_layout(Vs),
                }
            )
            T.annotate_min_blocks_per_sm(v.ctas_per_sm)
            k_ready = T.alloc_barrier([32] * stages)
            v_ready = T.alloc_barrier([32] * stages)
            k_free = T.alloc_barrier([consumer_threads] * stages)
            v_free = T.alloc_barrier([consumer_threads] * stages)

            acc_s = T.alloc_fragment([rows, keys], accum)
            acc_o = T.alloc_fragment([rows, dim], accum)
            p0 = T.alloc_fragment([rows, 64], dtype)
            p1 = T.alloc_fragment([rows, 64], dtype)
            m = T.alloc_fragment([rows], accum)
            m_before = T.alloc_fragment([rows], accum)
            alpha = T.alloc_fragment([rows], accum)
            total = T.alloc_fragment([rows], accum)
            row_sum = T.alloc_fragment([rows], accum)
            ends = T.alloc_fragment([rows], "int32")
            start = T.alloc_fragment([rows], "int32")
            stop = T.alloc_fragment([rows], "int32")
            bounds = T.alloc_local([4], "int32")
            grew = T.alloc_local([1], "int32")
            ahead = T.alloc_local([2], "int32")
            entry = T.alloc_local([4 * boxes], "int32")
            coming = T.alloc_local([4 * boxes], "int32")
            limits = T.alloc_local([2], "int32")
            run = T.alloc_local([1], "int32")
            delta = T.alloc_local([1], "int32")
            x = T.alloc_local([batch, 2 * width], dtype)
            cs = T.alloc_local([batch, 2 * width], accum)

            tx = T.get_thread_binding()
            factor = cap2 if v.capped else scale2
            if tx >= consumer_threads:
                if v.registers is not None:
                    T.set_max_nreg(v.registers[0], 0)
                if tx < consumer_threads + 32:
                    produce(KV, Entries, Works, work, Ks, Vs, k_ready, k_free, v_ready, v_free)
            else:
                if v.registers is not None:
                    T.set_max_nreg(v.registers[1], 1)
                head = Works[work, WORK_HEAD]
                begin = Works[work, WORK_BEGIN]
                count = Works[work, WORK_END] - begin
                T.fill(acc_o, 0)
                T.fill(total, 0)
                T.fill(m, EMPTY)
                for b in T.unroll(boxes):
                    for f in T.vectorized(4):
                        coming[4 * b + f] = Entries[begin * boxes + b, f]
                if v.pingpong:
                    if tx >= 128:
                        T.named_barrier_arrive(PING, 256)
                fetch(0, begin, count, Entries, entry, coming)
                open_rows(tx, Works[work, WORK_TILE], TileRows, RowOf)
                clear_rows(tx, Qs)
                foresee_run(entry[ENTRY_RUN], Runs, ahead)
                foresee_delta(tx, Deltas, ahead, delta)
                look(tx, Positions, Step, RowOf, Ends, delta)
                turn(tx, head, Q, Rope, Qs, RowOf, Ends, x, cs)
                hold(tx, Ends, ends, limits)
                my_turn(tx)
                T.mbarrier_wait_parity(k_ready[0], 0)
                issue_scores(0, Qs, Ks, acc_s)
                your_turn(tx)
                if coming[ENTRY_RUN] != entry[ENTRY_RUN]:
                    foresee_run(coming[ENTRY_RUN], Runs, ahead)
                T.wait_wgmma(0)
                T.mbarrier_arrive(k_free[0])
                if v.capped:
                    squash(acc_s, scale2)
                mask(entry, limits, ends, start, stop, acc_s, window)
                softmax(acc_s, m, m_before, alpha, total, row_sum, factor, grew)
                pack(acc_s, p0, p1)
                if coming[ENTRY_RUN] != entry[ENTRY_RUN]:
                    foresee_delta(tx, Deltas, ahead, delta)
                clean(tx, 0, 0, entry, bounds, Vs, v_ready)
                for k in T.serial(1, count):
                    run[0] = entry[ENTRY_RUN]
                    fetch(k, begin, count, Entries, entry, coming)
                    if entry[ENTRY_RUN] != run[0]:
                        look(tx, Positions, Step, RowOf, Ends, delta)
                        if half > 0:
                            turn(tx, head, Q, Rope, Qs, RowOf, Ends, x, cs)
                        hold(tx, Ends, ends, limits)
                    my_turn(tx)
                    T.mbarrier_wait_parity(k_ready[k % stages], (k // stages) % 2)
                    issue_scores(k % stages, Qs, Ks, acc_s)
                    if T.any_sync(grew[0]) != 0:
                        for i, j in T.Parallel(rows, dim):
                            acc_o[i, j] *= alpha[i]
                    T.mbarrier_wait_parity(v_ready[(k - 1) % stages], ((k - 1) // stages) % 2)
                    issue_values((k - 1) % stages, p0, p1, Vs, acc_o)
                    your_turn(tx)
                    if coming[ENTRY_RUN] != entry[ENTRY_RUN]:
                        foresee_run(coming[ENTRY_RUN], Runs, ahead)
                    T.wait_wgmma(boxes)
                    T.mbarrier_arrive(k_free[k % stages])
                    if v.capped:
                        squash(acc_s, scale2)
                    mask(entry, limits, ends, start, stop, acc_s, window)
                    softmax(acc_s, m, m_before, alpha, total, row_sum, factor, grew)
                    for i in T.Parallel(rows):
                        Pin[i] = row_sum[i]
                    T.wait_wgmma(0)
                    T.mbarrier_arrive(v_free[(k - 1) % stages])
                    pack(acc_s, p0, p1)
                    if coming[ENTRY_RUN] != entry[ENTRY_RUN]:
                        foresee_delta(tx, Deltas, ahead, delta)
                    clean(tx, k % stages, (k // stages) % 2, entry, bounds, Vs, v_ready)
                for i, j in T.Parallel(rows, dim):
                    acc_o[i, j] *= alpha[i]
                T.mbarrier_wait_parity(v_ready[(count - 1) % stages], ((count - 1) // stages) % 2)
                issue_values((count - 1) % stages, p0, p1, Vs, acc_o)
                T.wait_wgmma(0)
                part = Works[work, WORK_PART]
                if part >= 0:
                    write_part(part, acc_o, m, total, alpha, factor, RowOf, OPart, Lse2Part)
                else:
                    write_out(
                        head, acc_o, m, total, alpha, row_sum, m_before, factor, Sinks2, RowOf, Out, Lse2
                    )

    return attend
