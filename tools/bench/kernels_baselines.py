"""What the product is raced against, where it can be imported: FlashAttention-3, FlashInfer, torch's SDPA.

None of them knows deltas or slices: a baseline reads, per sequence, as many tokens of K and V as the sequence sees,
in the pages of the table where page lists allow it (sequences that share pages share them here too), and computes
plain attention over keys as they lie. That is what it would cost it once K had been rotated to its views for free.

    fa3                  paged, in its own layout [pages, page size, kv heads, head dim]; scheduled ahead or not
    flashinfer           BatchDecodeWithPagedKVCacheWrapper on our pages ([pages, 2, kv heads, page size, head dim])
    flashinfer-cascade   MultiLevelCascadeAttentionWrapper: the first pages that all sequences share, and the rest
    sdpa                 torch.nn.functional, cuDNN and flash, on contiguous K and V
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from bench.kernels_cases import Heads
from dagengine_kernels import HI, LO, PAGE, SegmentTable

WORKSPACE_BYTES = 512 << 20


@dataclass(frozen=True, eq=False)
class Paged:
    """A table as page lists: what sequence b sees is the first lengths[b] tokens of pages[b].

    `exact` says whether these are the tokens that the table lists, in their order.
    """

    pages: tuple[tuple[int, ...], ...]
    lengths: tuple[int, ...]
    rows: tuple[int, ...]
    page_size: int
    exact: bool

    @classmethod
    def of(cls, table: SegmentTable) -> Paged:
        pages, lengths, exact = [], [], True
        for b in range(table.num_sequences):
            mine = table.extents[table.extent_indptr[b] : table.extent_indptr[b + 1]]
            length = int((mine[:, HI] - mine[:, LO]).sum())
            need = -(-length // table.page_size)
            listed = mine[:, PAGE].tolist()
            pages.append(tuple((listed + listed)[:need]))
            lengths.append(length)
            whole = (mine[:-1, HI] == table.page_size).all() and (mine[:, LO] == 0).all()
            exact = exact and bool(whole) and len(listed) == need
        rows = np.diff(table.q_indptr).tolist()
        return cls(tuple(pages), tuple(lengths), tuple(rows), table.page_size, exact)


@dataclass(frozen=True, eq=False)
class Baseline:
    """One contender. run(i) computes attention of q over input set i and returns [T, Hq, D]."""

    name: str
    run: Callable[[int], Tensor]


class Absent(Exception):
    """A baseline cannot run a case; the message says why."""


class NotInstalled(Absent):
    """It cannot run anything here."""


def _module(name: str) -> object:
    try:
        return importlib.import_module(name)
    except Exception as error:
        raise NotInstalled(
            f"{name} cannot be imported: {type(error).__name__}: {str(error)[:120]}"
        ) from error


def fa3(paged: Paged, heads: Heads, q: Tensor, pools: Sequence[Tensor], *, metadata: bool) -> Baseline:
    """FlashAttention-3 as vLLM builds it, paged and causal.

    Args:
        q: [T, Hq, D].
        pools: [pages, 2, Hkv, page size, D] each; read as [pages, page size, Hkv, D] twice, the same bytes.
        metadata: schedule ahead, once per batch, as vLLM does; else in every call.
    Raises: Absent.
    """
    vfa3 = _module("vfa3")
    device = q.device
    width = max(len(p) for p in paged.pages)
    block_table = torch.tensor(
        [[*p, *([0] * (width - len(p)))] for p in paged.pages], dtype=torch.int32, device=device
    )
    lens = torch.tensor(paged.lengths, dtype=torch.int32, device=device)
    cu = torch.tensor([0, *np.cumsum(paged.rows).tolist()], dtype=torch.int32, device=device)
    caches = [_halves(pool, heads, paged.page_size) for pool in pools]
    longest, most = max(paged.lengths), max(paged.rows)
    options = {}
    if metadata:
        options["scheduler_metadata"] = vfa3.get_scheduler_metadata(  # type: ignore[attr-defined]
            len(paged.lengths),
            most,
            longest,
            heads.query,
            heads.kv,
            heads.dim,
            lens,
            qkv_dtype=q.dtype,
            cu_seqlens_q=cu,
            page_size=paged.page_size,
            causal=True,
        )

    def run(i: int) -> Tensor:
        k, v = caches[i]
        return vfa3.flash_attn_varlen_func(  # type: ignore[attr-defined, no-any-return]
            q,
            k,
            v,
            max_seqlen_q=most,
            cu_seqlens_q=cu,
            max_seqlen_k=longest,
            seqused_k=lens,
            block_table=block_table,
            causal=True,
            fa_version=3,
            **options,
        )

    return Baseline("fa3, metadata ahead" if metadata else "fa3", run)


def _halves(pool: Tensor, heads: Heads, page_size: int) -> tuple[Tensor, Tensor]:
    """The bytes of a pool as two contiguous caches [pages, page size, Hkv, D]."""
    flat = pool.view(-1)
    half = flat.numel() // 2
    shape = (-1, page_size, heads.kv, heads.dim)
    return flat[:half].view(shape), flat[half:].view(shape)


def fa3_contiguous(paged: Paged, heads: Heads, q: Tensor, pools: Sequence[Tensor]) -> Baseline:
    """FlashAttention-3 on contiguous K and V [tokens, Hkv, D], varlen and causal. Raises: Absent."""
    vfa3 = _module("vfa3")
    total = sum(paged.lengths)
    cu_q, cu_k = (
        torch.tensor([0, *np.cumsum(n).tolist()], dtype=torch.int32, device=q.device)
        for n in (paged.rows, paged.lengths)
    )
    caches = [
        tuple(half.reshape(-1, heads.kv, heads.dim)[:total] for half in _halves(pool, heads, paged.page_size))
        for pool in pools
    ]

    def run(i: int) -> Tensor:
        k, v = caches[i]
        return vfa3.flash_attn_varlen_func(  # type: ignore[attr-defined, no-any-return]
            q,
            k,
            v,
            max_seqlen_q=max(paged.rows),
            cu_seqlens_q=cu_q,
            max_seqlen_k=max(paged.lengths),
            cu_seqlens_k=cu_k,
            causal=True,
            fa_version=3,
        )

    return Baseline("fa3, contiguous", run)


def flashinfer(paged: Paged, heads: Heads, q: Tensor, pools: Sequence[Tensor], workspace: Tensor) -> Baseline:
    """FlashInfer's paged decode with tensor cores, on our own layout. Raises: Absent."""
    library = _module("flashinfer")
    if set(paged.rows) != {1}:
        raise Absent("its decode takes one row a sequence")
    wrapper = library.BatchDecodeWithPagedKVCacheWrapper(  # type: ignore[attr-defined]
        workspace, "HND", use_tensor_cores=True
    )
    indptr, indices, last = _page_lists(paged.pages, paged.lengths, paged.page_size)
    wrapper.plan(
        indptr.to(q.device),
        indices.to(q.device),
        last.to(q.device),
        heads.query,
        heads.kv,
        heads.dim,
        paged.page_size,
        q_data_type=q.dtype,
        kv_data_type=q.dtype,
    )
    out = torch.empty_like(q)
    return Baseline("flashinfer", lambda i: wrapper.run(q, pools[i], out=out))


def flashinfer_cascade(
    paged: Paged, heads: Heads, q: Tensor, pools: Sequence[Tensor], workspace: Tensor
) -> Baseline:
    """FlashInfer's cascade of two levels: the first pages that all sequences have in common, and the rest.

    Raises: Absent, also where nothing is common.
    """
    library = _module("flashinfer")
    if set(paged.rows) != {1} or len(paged.pages) < 2:
        raise Absent("a cascade of decode rows wants one row a sequence, and several")
    common = 0
    shortest = min(n // paged.page_size for n in paged.lengths)
    while common < shortest and len({p[common] for p in paged.pages}) == 1:
        common += 1
    if not common:
        raise Absent("the sequences have no first pages in common")
    size = paged.page_size
    shared = _page_lists((paged.pages[0][:common],), (common * size,), size)
    rest = _page_lists([p[common:] for p in paged.pages], [n - common * size for n in paged.lengths], size)
    count = len(paged.pages)
    levels = [torch.tensor([0, count], dtype=torch.int32), torch.arange(count + 1, dtype=torch.int32)]
    wrapper = library.MultiLevelCascadeAttentionWrapper(2, workspace, "HND")  # type: ignore[attr-defined]
    wrapper.plan(
        [level.to(q.device) for level in levels],
        *([a.to(q.device), b.to(q.device)] for a, b in zip(shared, rest, strict=True)),
        heads.query,
        heads.kv,
        heads.dim,
        size,
        q_data_type=q.dtype,
    )
    return Baseline("flashinfer-cascade", lambda i: wrapper.run(q, pools[i]))


def _page_lists(
    pages: Sequence[Sequence[int]], lengths: Sequence[int], page_size: int
) -> tuple[Tensor, Tensor, Tensor]:
    indptr = np.cumsum([0, *(len(p) for p in pages)])
    indices = [page for p in pages for page in p]
    last = [(n - 1) % page_size + 1 for n in lengths]
    return tuple(torch.tensor(x, dtype=torch.int32) for x in (indptr.tolist(), indices, last))  # type: ignore[return-value]


def sdpa(paged: Paged, heads: Heads, q: Tensor, pools: Sequence[Tensor], which: str) -> Baseline:
    """torch's SDPA on contiguous K and V [1, H, L, D] of one sequence: a causal prompt, or one row.

    Args:
        which: cudnn or flash.
    Raises: Absent.
    """
    (rows,), (length,) = (paged.rows, paged.lengths) if len(paged.rows) == 1 else ((0,), (0,))
    if rows not in (1, length) or not rows:
        raise Absent("torch's causal mask wants one sequence whose rows are all its tokens, or its last")
    backend = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}[which]
    x = q.transpose(0, 1)[None]
    caches = [
        tuple(
            half.reshape(-1)[: length * heads.kv * heads.dim].view(1, heads.kv, length, heads.dim)
            for half in p
        )
        for p in (_halves(pool, heads, paged.page_size) for pool in pools)
    ]

    def run(i: int) -> Tensor:
        k, v = caches[i]
        with sdpa_kernel(backend):
            out = torch.nn.functional.scaled_dot_product_attention(
                x, k, v, is_causal=rows > 1, enable_gqa=heads.query != heads.kv
            )
        return out[0].transpose(0, 1)

    return Baseline(f"sdpa, {which}", run)
