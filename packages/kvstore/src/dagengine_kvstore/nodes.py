"""A node's record: its tokens, what it read, and which of its pages exist. Decides nothing about lifetimes:
the store and `holds.py` keep the bookkeeping fields.

References point from a node to what it read, never back, so a record lives exactly as long as somebody can
still need it: a handle, a holder, or a later node whose recipe reads it. Leases alone point both ways, until they are
released.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple

from dagengine_kvstore.errors import KVStoreError
from dagengine_kvstore.reuse import Context, page_key

if TYPE_CHECKING:
    from dagengine_kvstore.holds import Hold
    from dagengine_kvstore.leases import Lease
    from dagengine_kvstore.references import Parent, Read
    from dagengine_kvstore.residency import PageCopy


UNKNOWN = -1
"""In place of a token that is not known yet, of a node that was sealed early."""


class NodeStatus(StrEnum):
    WRITING = "writing"
    SEALED = "sealed"
    ABORTED = "aborted"


class Extent(NamedTuple):
    """Rows `lo..hi` of one page; `stored` is the position at which row `lo` was computed."""

    page: int
    lo: int
    hi: int
    stored: int


@dataclass(frozen=True, slots=True)
class Recipe:
    """Enough to compute a node again, recursively through the nodes of `reads`."""

    tokens: tuple[int, ...]
    own_start: int
    reads: tuple[Read, ...]
    signature: tuple[tuple[str, str], ...]
    salt: str


class NodeRecord:
    """One chain of tokens, being written or sealed. Compared by identity; `uid` is never used twice.

    Token i has the logical stored position `own_start + i`. `pages[k]` holds the rows of tokens
    [k * page_size, (k + 1) * page_size), or None where nothing holds them or they were evicted. `copies[k]` is what a
    lower tier has or is getting of that page, or None; the list is empty before there is the first. Pages are changed
    by `set_page` and `set_pages` only. Sealed early, its last `num_unknown` tokens are `UNKNOWN` until its writer is
    told them.
    """

    __slots__ = (
        "__weakref__",
        "_content_keys",
        "_context",
        "_make_context",
        "_page_keys",
        "_page_size",
        "_run",
        "copies",
        "cover",
        "last_used",
        "leases",
        "num_unknown",
        "own_start",
        "pages",
        "parents",
        "reads",
        "recomputable",
        "restoring",
        "root",
        "salt",
        "signature",
        "spans",
        "status",
        "tokens",
        "uid",
    )

    def __init__(
        self,
        uid: int,
        own_start: int,
        parents: tuple[Parent, ...],
        reads: tuple[Read, ...],
        signature: tuple[tuple[str, str], ...],
        salt: str,
        context: Context | Callable[[], Context],
        root: Hold,
        page_size: int,
    ) -> None:
        self.uid = uid
        self.own_start = own_start
        self.parents = parents
        self.reads = reads
        self.signature = signature
        self.salt = salt
        self._context = context if isinstance(context, Context) else None
        self._make_context = None if isinstance(context, Context) else context
        self.status = NodeStatus.WRITING
        self.tokens: list[int] | tuple[int, ...] = []
        self.num_unknown = 0
        self.spans: Mapping[str, tuple[int, int]] = {}
        self.pages: list[int | None] = []
        self.copies: list[PageCopy | None] = []
        self.root = root
        self.cover: dict[tuple[int, int], int] = {}  # held range -> number of holds on it
        self.leases: dict[Lease, int] = {}  # those that read it, and how often each does
        self.restoring = False
        self.recomputable = True  # whether its recipe gives the KV that it has; if not, that is never lost
        self.last_used = 0
        self._content_keys: dict[int, bytes] = {}
        self._page_keys: list[bytes] = []  # of the first full pages
        self._page_size = page_size
        self._run: array[int] | None = None

    def __repr__(self) -> str:
        return f"NodeRecord(uid={self.uid}, {self.status}, {self.length} tokens)"

    @property
    def length(self) -> int:
        return len(self.tokens)

    @property
    def context(self) -> Context:
        """What the KV of its tokens depends on besides them. Raises KVStoreError `not_filled` while it reads tokens
        that are not known.
        """
        if self._context is None:
            assert self._make_context is not None
            self._context, self._make_context = self._make_context(), None
        return self._context

    @property
    def has_context(self) -> bool:
        """Whether `context` can be asked for: all tokens of the nodes that it reads are known."""
        return self._context is not None or not any(read.node.num_unknown for read in self.reads)

    @property
    def sealed(self) -> bool:
        return self.status is NodeStatus.SEALED

    def run(self) -> array[int] | None:
        """Its pages in order, int32 and not to be changed, kept until one changes; None while one is missing."""
        if self._run is None and None not in self.pages:
            self._run = array("i", self.pages)  # type: ignore[arg-type]  # none is missing
        return self._run

    def set_page(self, index: int, page: int | None) -> None:
        """Replace one page, or take it away."""
        self.pages[index] = page
        self._run = None

    def set_pages(self, pages: Iterable[int]) -> None:
        """Replace all pages."""
        self.pages = list(pages)
        self._run = None

    def run_is_true(self) -> bool:
        """Whether what `run` keeps are the pages: always, unless the books are wrong."""
        return self._run is None or self._run.tolist() == self.pages

    @property
    def recipe(self) -> Recipe:
        """What restoring this sealed node needs."""
        return Recipe(tuple(self.tokens), self.own_start, self.reads, self.signature, self.salt)

    @property
    def held(self) -> bool:
        """Whether anything keeps some of its tokens or what it passes on."""
        return bool(self.cover) or self.root.refs > 0

    def covers(self, start: int, stop: int) -> bool:
        """Whether holds keep every token of [start, stop)."""
        if (start, stop) in self.cover or start >= stop:
            return True
        for lo, hi in sorted(self.cover):
            if lo <= start < hi:
                start = hi
        return start >= stop

    def content_key(self, stop: int) -> bytes:
        """Stable key of what the KV of tokens [0, stop) is: context and tokens, not position and not node. It is that
        of the last of their pages. Raises KVStoreError `not_filled` for tokens that are not known.
        """
        key = self._content_keys.get(stop)
        if key is None:
            if stop > len(self.tokens) - self.num_unknown:
                message = f"the last {self.num_unknown} tokens of node {self.uid} are not known"
                raise KVStoreError("not_filled", message, field="tokens")
            key = self._key_behind(stop)
            if self.sealed:
                self._content_keys[stop] = key
        return key

    def set_tokens(self, tokens: Sequence[int], num_unknown: int) -> None:
        """Its tokens, of which so many more are not known yet; for good where there are none."""
        self.tokens = (*tokens, *(UNKNOWN,) * num_unknown)
        self.num_unknown = num_unknown

    def know_page_key(self, index: int, key: bytes) -> None:
        """What `content_key` is behind full page `index`, from who works that out anyway."""
        if index == len(self._page_keys):
            self._page_keys.append(key)

    def forget_page_keys(self) -> None:
        """Its writer was rolled back: where it is new, other tokens may come."""
        self._page_keys.clear()

    def _key_behind(self, stop: int) -> bytes:
        size, known = self._page_size, len(self._page_keys)
        end = min(stop // size, known) * size
        key = self._page_keys[end // size - 1] if end else self.context.key
        while end < stop:
            begin, end = end, min(end + size, stop)
            key = page_key(key, self.tokens[begin:end])
            if end - begin == size and self.sealed:
                self.know_page_key(begin // size, key)
        return key
