"""Writing KV into pages: a new node's, or again an evicted node's. Knows one chain of tokens and its pages;
the books lend the pool, the content table and the holds.

    tokens   0 ········ committed ········ num_known ········· num_tokens ········ capacity
             │ computed and readable  │ appended, step running │ to be filled │ reserved │

A step may write KV of tokens that nobody on the host knows yet, such as one that the step before it samples: they are
appended by their number and named by `fill`. Pages before `committed` that are full carry their content and may be
shared, so nothing is committed before it is known. A page attached by `match` is never written: it is full, or it is
the last one and closes the chain.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from dagengine_kvstore.errors import KVStoreError
from dagengine_kvstore.holds import Hold
from dagengine_kvstore.leases import Lease, page_extents
from dagengine_kvstore.nodes import Extent, NodeRecord
from dagengine_kvstore.reuse import Context, Prefix

if TYPE_CHECKING:
    from dagengine_kvstore.books import Books


class PageWriter:
    """What writers have in common. Not made by users: see KVStore.begin and KVStore.restore."""

    def __init__(self, books: Books, node: NodeRecord) -> None:
        self.node = node
        self.pages: list[int] = []
        self.page_size = books.page_size
        self._books = books
        self._tokens: list[int] = []
        self.num_unknown = 0  # appended behind `_tokens`, not filled
        self._committed = 0
        self._content: Context | Prefix | None = None  # of the pages before `_known`; None before the first
        self._known = 0  # pages whose content is known
        self._ahead: deque[Prefix] = deque()  # contents of the next pages, which are not committed
        self._closed_tail = False  # the last page is partial and shared
        self._open = True

    @property
    def num_tokens(self) -> int:
        """Tokens appended, known or not."""
        return len(self._tokens) + self.num_unknown

    @property
    def num_known(self) -> int:
        return len(self._tokens)

    @property
    def num_committed(self) -> int:
        return self._committed

    @property
    def capacity(self) -> int:
        """Tokens that fit into the pages reserved so far."""
        return self.num_tokens if self._closed_tail else len(self.pages) * self.page_size

    def pages_needed(self, count: int) -> int:
        """Pages that `reserve(count)` would take."""
        short = len(self._tokens) + self.num_unknown + count - len(self.pages) * self.page_size
        return -(-short // self.page_size) if short > 0 else 0

    def match(self, tokens: Sequence[int], *, whole: bool = False) -> int:
        """Attach pages of equal earlier work for the next tokens, which then count as written and committed.

        `tokens` are the next tokens that need not be computed: leave out the last one if its logits are
        needed. With `whole`, a partial last page is attached too if every token matches; nothing can be
        appended behind it.

        Returns:
            The number of tokens reused: full pages only, or all of `tokens`; none while the node reads tokens that are
            not known.

        Raises:
            KVStoreError `match_misaligned` behind a page that is not full or while pages are reserved.
        """
        self._check_open()
        size = self._books.page_size
        if self._closed_tail or not len(self.pages) * size == self.num_tokens == self._committed:
            raise KVStoreError("match_misaligned", "match before anything is reserved behind full pages")
        if not self.node.has_context:
            return 0
        contents, pool = self._books.contents, self._books.pool
        reused = 0
        while reused < len(tokens):
            chunk = tokens[reused : reused + size]
            if len(chunk) < size and not whole:
                break
            content = contents.find(self._before, chunk)
            page = None if content is None else pool.find(content)
            if content is None or page is None:
                break
            pool.share(page)
            self._attach(page, content, chunk)
            reused += len(chunk)
        self._books.tokens_reused += reused
        self._books.note("match", self.node, tokens=reused)
        return reused

    def page_keys(self, tokens: Sequence[int]) -> list[bytes]:
        """Content keys of the full pages that the next tokens would fill: what a persistent tier knows them by.

        Raises KVStoreError `match_misaligned` behind a page that is not full or not committed, `not_filled` while the
        node reads tokens that are not known.
        """
        self._check_open()
        size = self.page_size
        if self._closed_tail or self.num_tokens % size or self._committed < self.num_tokens:
            raise KVStoreError("match_misaligned", "ask behind full pages that are committed")
        content, keys = self._before, []
        for start in range(0, len(tokens) - size + 1, size):
            content = Prefix(content, tuple(tokens[start : start + size]))
            keys.append(content.key)
        return keys

    def adopt(self, tokens: Sequence[int], bases: Sequence[int]) -> None:
        """The next tokens' KV was brought to the pages reserved for them, not computed: they count as committed.

        Args:
            tokens: of full pages.
            bases: stored position of row 0 of each of these pages.

        Raises as `page_keys` and `append`; KVStoreError `invalid_count` if tokens and pages do not match.
        """
        self.page_keys(())
        size, first = self.page_size, len(self._tokens) // self.page_size
        if len(tokens) != size * len(bases):
            message = f"{len(bases)} pages hold {size * len(bases)} tokens, not {len(tokens)}"
            raise KVStoreError("invalid_count", message, field="bases")
        self.append(tokens)
        for page, base in zip(self.pages[first : first + len(bases)], bases, strict=True):
            self._books.pool.base[page] = base
        self._committed = len(self._tokens)
        while (self._known + 1) * size <= self._committed:
            self._learn(self._tokens[self._known * size : (self._known + 1) * size])
        self._books.tokens_recalled += len(tokens)
        self._books.note("recalled", self.node, tokens=len(tokens))

    def pages_spare(self, count: int) -> int:
        """Pages reserved behind the next `count` tokens: what `give_back(count)` would give."""
        return max(0, len(self.pages) - -(-(self.num_tokens + count) // self.page_size))

    def reserve(self, count: int, *, evict: bool = True) -> None:
        """Pages for `count` more tokens, all or nothing: free ones, then cached ones, then evicted states'.

        Args:
            evict: whether states may be evicted for them.

        Raises:
            OutOfPages (code `capacity`): nothing was dropped; states that must be stored first may be on their way.
            KVStoreError `partial_page_shared` behind a partial page attached by `match`.
        """
        self._check_open()
        if count < 0:
            raise KVStoreError("invalid_count", f"count must not be negative: {count}", field="count")
        if self._closed_tail and count:
            message = "the last page is another node's partial page and cannot be appended to"
            raise KVStoreError("partial_page_shared", message, field="count")
        needed = self.pages_needed(count)
        if not needed:
            return
        after = self.pages[-1] if self.pages else None
        pages = self._books.pressure.take_pages(self.node, needed, after, evict=evict)
        for page in pages:
            self._books.pool.base[page] = self.node.own_start + len(self.pages) * self._books.page_size
            self.pages.append(page)

    def give_back(self, count: int, most: int | None = None) -> int:
        """Give back pages reserved behind the next `count` tokens, the last ones first. No slot in them was given, so
        no open step touches them: they are free at once.

        `pages` is another list then: who remembers it sees that pages it was promised are gone.

        Args:
            most: how many at most; None: all.

        Returns: how many.

        Raises KVStoreError `invalid_count` for a negative number.
        """
        self._check_not_ended()
        for field, number in (("count", count), ("most", most or 0)):
            if number < 0:
                raise KVStoreError("invalid_count", f"{field} must not be negative: {number}", field=field)
        spare = self.pages_spare(count) if most is None else min(most, self.pages_spare(count))
        if spare:
            self.pages = self.pages.copy()
            self._drop_pages(len(self.pages) - spare, touched=False)
        return spare

    def append(self, tokens: Sequence[int], unknown: int = 0) -> list[int]:
        """The slots (page * page_size + row) that the KV of the next tokens goes to.

        Args:
            tokens: those that are known.
            unknown: how many follow that are not; `fill` names them later, before they are committed.

        Raises:
            KVStoreError `not_reserved` if there are fewer reserved rows than tokens, `not_filled` for known tokens
            behind unknown ones, `invalid_count`.
        """
        if not self._open:
            self._check_open()
        if unknown < 0:
            raise KVStoreError("invalid_count", f"unknown must not be negative: {unknown}", field="unknown")
        if tokens and self.num_unknown:
            message = f"{self.num_unknown} tokens before these are unknown; fill them first"
            raise KVStoreError("not_filled", message, field="tokens")
        begin, count = len(self._tokens) + self.num_unknown, len(tokens) + unknown
        if begin + count > self.capacity:
            room = self.capacity - begin
            raise KVStoreError("not_reserved", f"reserve {count} tokens first, {room} are", field="tokens")
        size, pages = self.page_size, self.pages
        if tokens:
            self._tokens.extend(tokens)
        self.num_unknown += unknown
        if count == 1:
            return [pages[begin // size] * size + begin % size]
        slots: list[int] = []
        while count:
            row = begin % size
            first, rows = pages[begin // size] * size + row, min(count, size - row)
            slots += range(first, first + rows)
            begin, count = begin + rows, count - rows
        return slots

    def fill(self, tokens: Sequence[int]) -> None:
        """Name the first of the tokens that were appended unknown.

        Raises KVStoreError `invalid_count` for more than there are.
        """
        if not self._open:
            self._check_not_ended()
        if len(tokens) > self.num_unknown:
            message = f"{self.num_unknown} tokens are unknown, not {len(tokens)}"
            raise KVStoreError("invalid_count", message, field="tokens")
        self._tokens.extend(tokens)
        self.num_unknown -= len(tokens)
        if self.node.num_unknown:
            self.node.set_tokens(self._tokens, self.num_unknown)

    def commit(self, count: int) -> None:
        """The step that wrote the next `count` appended tokens is done: full pages become reusable.

        Raises KVStoreError `invalid_count` for more tokens than were appended, `not_filled` for unknown ones and while
        the node reads such.
        """
        if not self._open:
            self._check_not_ended()
        known = len(self._tokens)
        pending = known + self.num_unknown - self._committed
        if not 0 <= count <= pending:
            raise KVStoreError(
                "invalid_count", f"{pending} tokens are not committed, not {count}", field="count"
            )
        if self._committed + count > known:
            message = f"{known - self._committed} of {count} tokens are known; fill the others first"
            raise KVStoreError("not_filled", message, field="count")
        self._check_context("count")
        self._committed += count
        self._books.tokens_written += count
        size = self.page_size
        while (self._known + 1) * size <= self._committed:
            self._learn(self._tokens[self._known * size : (self._known + 1) * size])

    def extents(self, start: int = 0, stop: int | None = None) -> list[Extent]:
        """(page, lo, hi, stored) of tokens [start, stop) appended so far, in order."""
        self._check_not_ended()
        stop = self.num_tokens if stop is None else stop
        if not 0 <= start <= stop <= self.num_tokens:
            message = f"[{start}, {stop}) is not inside [0, {self.num_tokens})"
            raise KVStoreError("span_out_of_range", message, field="stop")
        size = self._books.page_size
        return page_extents(self._books.pool, self.pages[start // size :], size, start, stop)

    def rollback(self) -> None:
        """Give all own pages back and forget the tokens; what the node reads stays held. `pages` is another list then,
        as after `give_back`.
        """
        self._check_open()
        self.pages = self.pages.copy()
        self._drop_pages()
        self._tokens.clear()
        self.node.forget_pages()
        self.num_unknown = self._committed = self._known = 0
        self._content = None
        self._ahead.clear()
        self._closed_tail = False
        self._books.note("rollback", self.node)

    def _attach(self, page: int, content: Prefix, tokens: Sequence[int]) -> None:
        self.pages.append(page)
        self._tokens.extend(tokens)
        self._committed = self.num_tokens
        self._closed_tail = len(tokens) < self._books.page_size
        self._know(content)

    def _learn(self, tokens: Sequence[int]) -> None:
        content = self._ahead.popleft() if self._ahead else self._books.contents.extend(self._before, tokens)
        self._books.pool.remember(self.pages[self._known], content)
        self._know(content)

    @property
    def _before(self) -> Context | Prefix:
        """What stands before the first page that is not known."""
        return self.node.context if self._content is None else self._content

    def _know(self, content: Prefix) -> None:
        """This is what the next page holds."""
        if len(content.tokens) == self.page_size:
            self.node.know_page(self._known, content.key)
        self._content = content
        self._known += 1

    def _finish_pages(self) -> None:
        """Give back pages reserved in vain and make a partial last page known."""
        if self._committed < self.num_tokens:
            pending = self.num_tokens - self._committed
            raise KVStoreError("not_committed", f"{pending} tokens are appended but not committed")
        size = self._books.page_size
        needed = -(-self.num_tokens // size)
        self._drop_pages(needed)
        if self._known < needed:
            self._learn(self._tokens[self._known * size :])

    def _drop_pages(self, keep: int = 0, *, touched: bool = True) -> None:
        while len(self.pages) > keep:
            self._books.pool.drop(self.pages.pop(), touched=touched)

    def _check_open(self) -> None:
        if not self._open:
            raise KVStoreError("writer_closed", f"the writer of node {self.node.uid} is closed")

    def _check_context(self, field: str) -> None:
        if not self.node.has_context:
            message = f"node {self.node.uid} reads tokens that are not known"
            raise KVStoreError("not_filled", message, field=field)

    def _check_not_ended(self) -> None:
        """Of what may be asked for as long as a step of the writer's runs."""
        self._check_open()


class Writer(PageWriter):
    """Writes a new node, from `KVStore.begin` until `seal` or `abort`."""

    def __init__(self, books: Books, node: NodeRecord, digested: tuple[Hold, ...]) -> None:
        super().__init__(books, node)
        self.digested = digested
        self._early: Lease | None = None  # sealed, and the last step is still to end
        node.tokens = self._tokens

    def seal(self, spans: Mapping[str, tuple[int, int]] | None = None) -> NodeRecord:
        """Make the node immutable and let go of what it digested.

        The node comes back held once, as if by `KVStore.hold`: name it or read it, then `unhold` it. What was sealed
        early is not held once more; it keeps its spans, or these replace them.

        Raises:
            KVStoreError `not_committed` while appended tokens are not committed, `span_out_of_range`.
        """
        self._check_not_ended()
        checked = self._check_spans(self.node.spans if spans is None else spans)
        self._finish_pages()
        self._end()
        self._books.seal(self, checked)
        return self.node

    def seal_early(self, spans: Mapping[str, tuple[int, int]] | None = None) -> NodeRecord:
        """Make the node immutable and readable, though the step that computes its last tokens has not ended, or begun:
        for readers in that step, behind these tokens' writes, and in later ones.

        The node comes back as from `seal`. Nothing can be appended any more; `fill` what is not known, `commit` what is
        left when the step ends and then `seal`, or `abort`, and abort whoever reads it. Until then nobody finds the
        pages by what they hold, they stay on the device, and what the node reads and digested stays held. Who reads
        tokens that are not known shares no pages with equal work before they are, and cannot be read so early itself.

        Raises:
            KVStoreError `span_out_of_range`, `not_filled` for a node that reads tokens that are not known.
        """
        self._check_open()
        self._check_context("reads")
        checked = self._check_spans(spans)
        self._drop_pages(-(-self.num_tokens // self.page_size))
        self._early = self._books.seal_early(self, checked)
        self._open = False
        return self.node

    def look_ahead(self) -> None:
        """Work out already what the appended pages will be known by, of which `commit` and `seal` then have less to do:
        for while the step that writes them runs.
        """
        self._check_not_ended()
        size, tokens = self.page_size, self._tokens
        is_whole = self._early is not None and not self.num_unknown
        end = len(tokens) if is_whole else len(tokens) // size * size
        content = self._ahead[-1] if self._ahead else self._before
        for start in range((self._known + len(self._ahead)) * size, end, size):
            content = self._books.contents.extend(content, tokens[start : min(start + size, end)])
            self._ahead.append(content)

    def abort(self) -> None:
        """Give everything back; the node never becomes a state. One that was sealed early is none any more: it has no
        pages, `parent_failed` refuses who would read it, and holds on it keep nothing.
        """
        self._check_not_ended()
        if self.node.sealed:
            self._books.end_early(self)
        self._end()
        self._drop_pages()
        self._books.abort(self)

    def _check_open(self) -> None:
        if self._early is not None:
            raise KVStoreError("writer_closed", f"the writer of node {self.node.uid} is sealed early")
        super()._check_open()

    def _check_not_ended(self) -> None:
        if self._early is None:
            self._check_open()

    def _end(self) -> None:
        self._open, early, self._early = False, self._early, None
        if early is not None:
            early.release()

    def _check_spans(self, spans: Mapping[str, tuple[int, int]] | None) -> dict[str, tuple[int, int]]:
        checked = dict(spans or {})
        for name, (start, stop) in checked.items():
            if not 0 <= start <= stop <= self.num_tokens:
                message = f"span {name!r} [{start}, {stop}) is not inside [0, {self.num_tokens})"
                raise KVStoreError("span_out_of_range", message, field=f"spans.{name}")
        return checked


class RestoreWriter(PageWriter):
    """Computes the missing pages of a sealed node again, from `KVStore.restore` until `finish` or `abort`.

    Starts behind the pages that are still resident or can be matched; `todo` is what is left, and everything
    again after a `rollback`. Holds what the node reads, so that its sources stay once they are restored.
    """

    def __init__(self, books: Books, node: NodeRecord, target: int, holds: tuple[Hold, ...]) -> None:
        super().__init__(books, node)
        self.target = target
        self.holds = holds
        size = books.page_size
        for index, page in enumerate(node.pages[: -(-target // size)]):
            if page is None:
                break
            chunk = node.tokens[index * size : (index + 1) * size]
            books.pool.share(page)
            self._attach(page, books.contents.extend(self._before, chunk), chunk)
        if not self._closed_tail:
            self.match(node.tokens[self.num_tokens : target], whole=target == node.length)

    @property
    def todo(self) -> list[int]:
        """Tokens still to append, in order."""
        return list(self.node.tokens[self.num_tokens : self.target])

    def append(self, tokens: Sequence[int], unknown: int = 0) -> list[int]:
        """As Writer.append. Raises KVStoreError `recipe_mismatch` for tokens that are not next in `todo`."""
        if unknown or list(tokens) != self.todo[: len(tokens)]:
            raise KVStoreError("recipe_mismatch", "append the tokens of `todo`, in order", field="tokens")
        return super().append(tokens)

    def finish(self) -> NodeRecord:
        """Make the pages the node's own. Raises KVStoreError `not_committed` while `todo` is not computed."""
        self._check_open()
        if self.todo:
            raise KVStoreError("not_committed", f"{len(self.todo)} tokens are left to compute")
        self._finish_pages()
        self._open = False
        self._books.finish_restore(self)
        return self.node

    def abort(self) -> None:
        """Give everything back; the node stays as it was."""
        self._check_open()
        self._open = False
        self._drop_pages()
        self._books.abort_restore(self)
