from __future__ import annotations

from collections.abc import Sequence

import pytest
from kvstore_helpers import SIGNATURE, assert_all_pages_back, child, make_store, refused, write

from dagengine_kvstore import KVStore, NodeRecord, Parent, Read, Writer, reuse


def matched(store: KVStore, tokens: list[int], **options: object) -> int:
    """Tokens that a node without references would reuse."""
    writer = store.begin([], [], 0, **{"signature": SIGNATURE, **options})  # type: ignore[arg-type]
    reused = writer.match(tokens)
    writer.abort()
    return reused


def reading(store: KVStore, source: NodeRecord, own_start: int, delta: int, start: int = 0) -> Writer:
    read = Read(source, start, source.length, delta)
    return store.begin([Parent.inherit(source)], [read], own_start, signature=SIGNATURE)


def test_reuse_goes_down_to_full_pages() -> None:
    store = make_store()
    node = write(store, list(range(10)))
    writer = store.begin([], [], 0, signature=SIGNATURE)
    assert writer.match([*range(9), 77, 78]) == 8
    assert [extent.page for extent in writer.extents()] == node.pages[:2]
    assert store.stats().pages_shared == 2
    writer.reserve(1)
    assert writer.append([77])[0] // 4 not in node.pages
    writer.abort()
    assert matched(store, [0, 1, 2]) == 0, "less than a page"


def test_a_partial_last_page_is_shared_only_whole_and_never_appended_to() -> None:
    store = make_store()
    node = write(store, list(range(6)))
    assert matched(store, list(range(6))) == 4
    writer = store.begin([], [], 0, signature=SIGNATURE)
    assert writer.match(list(range(6)), whole=True) == 6 and writer.capacity == 6
    with refused("partial_page_shared"):
        writer.reserve(1)
    with refused("not_reserved"):
        writer.append([6])
    with refused("match_misaligned"):
        writer.match([6])
    twin = writer.seal()
    assert twin.pages == node.pages and twin is not node
    store.unhold(node)
    with store.lease([Read(twin, 0, 6)]) as lease:
        assert sum(extent.hi - extent.lo for extent in lease.extents(0)) == 6
    other = store.begin([], [], 0, signature=SIGNATURE)
    assert other.match(list(range(7)), whole=True) == 4, "the tail must match entirely"


def test_a_fragment_without_reads_is_reused_at_any_position_and_the_extents_tell_where() -> None:
    store = make_store()
    document = list(range(50, 58))
    write(store, document, own_start=0)
    prompt = write(store, [1, 2, 3, 4, 5])
    writer = store.begin([], [], 5, signature=SIGNATURE)
    assert writer.match(document, whole=True) == len(document), "span-level reuse at the second position"
    assert [extent.stored for extent in writer.extents()] == [0, 4], "computed at base 0, logically at 5"
    writer.reserve(1)
    writer.append([9])
    writer.commit(1)
    assert writer.extents()[-1].stored == 5 + 8, "own rows are stored where they are"
    second = writer.seal()
    with store.lease([Read(prompt, 0, 5), Read(second, 2, 9)]) as lease:
        extents = [tuple(extent)[1:] for extent in lease.extents(1)]
        assert lease.bases(1) == [stored - lo for lo, _, stored in extents]
        assert [lease.base_of[page] for page in lease.pages[1]] == lease.bases(1)
        assert extents == [(2, 4, 2), (0, 4, 4), (0, 1, 13)]


@pytest.mark.parametrize(
    "options", [{"salt": "x"}, {"signature": {**SIGNATURE, "dtype": "float16"}}, {"signature": {}}]
)
def test_another_salt_or_signature_reuses_nothing(options: dict[str, object]) -> None:
    store = make_store()
    tokens = list(range(8))
    write(store, tokens)
    assert matched(store, tokens) == 8
    assert matched(store, tokens, **options) == 0


def test_equal_context_is_equal_content_and_layout_relative_to_the_own_start() -> None:
    store = make_store(32)
    tokens = list(range(8))
    twins = [write(store, [1, 2, 3, 4, 5]) for _ in range(2)]
    other = write(store, [1, 2, 3, 4, 6])
    write(store, tokens, [Parent.inherit(twins[0])], [Read(twins[0], 0, 5)], 5)
    same = [
        reading(store, twins[0], 5, 0),
        reading(store, twins[1], 5, 0),  # another node of equal content
        reading(store, twins[1], 105, 100),  # everything shifted
    ]
    different = [
        reading(store, twins[0], 6, 0),  # further away
        reading(store, twins[0], 5, 0, start=1),  # sees less
        reading(store, other, 5, 0),  # sees other tokens
        store.begin([], [], 5, signature=SIGNATURE),  # sees nothing
    ]
    assert [writer.match(tokens) for writer in same] == [8, 8, 8]
    assert [extent.stored for extent in same[2].extents()] == [5, 9]
    assert [writer.match(tokens) for writer in different] == [0, 0, 0, 0]
    store.check()


def test_reads_in_another_order_are_another_context() -> None:
    store = make_store()
    a, b = write(store, [1, 2]), write(store, [3, 4])
    parents = [Parent.inherit(a), Parent.inherit(b)]
    reads = [Read(a, 0, 2, 0), Read(b, 0, 2, 2)]
    write(store, list(range(8)), parents, reads, 4)
    swapped = [Read(b, 0, 2, 0), Read(a, 0, 2, 2)]
    assert store.begin(parents, reads, 4, signature=SIGNATURE).match(list(range(8))) == 8
    assert store.begin(parents, swapped, 4, signature=SIGNATURE).match(list(range(8))) == 0


def test_colliding_digests_never_serve_wrong_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reuse, "digest", lambda fields: bytes(32))
    store = make_store(32)
    source, other = write(store, [1, 2, 3]), write(store, [1, 2, 4])
    tokens = list(range(8))
    node = child(store, source, tokens)
    assert matched(store, [7, 7, 7, 7]) == 0
    assert matched(store, tokens) == 0, "same tokens in another context"
    plain = [5] * 4
    write(store, plain)
    assert matched(store, plain) == 4
    assert matched(store, plain, salt="x") == 0
    assert matched(store, plain, signature={**SIGNATURE, "dtype": "float16"}) == 0
    assert reading(store, other, 3, 0).match(tokens) == 0, "same tokens behind another source"
    assert reading(store, source, 4, 0).match(tokens) == 0
    writer = reading(store, source, 3, 0)
    assert writer.match([*tokens[:4], 9, 9, 9, 9]) == 4
    assert [extent.page for extent in writer.extents()] == node.pages[:1]
    store.check()


def test_fields_of_a_key_are_tagged_and_length_prefixed() -> None:
    lists = [
        [("salt", b"ab"), ("name", b"")],
        [("salt", b"a"), ("name", b"b")],
        [("salt", b""), ("name", b"ab")],
        [("name", b"ab"), ("salt", b"")],
        [("salt", b"abname")],
        [("saltab", b""), ("name", b"")],
    ]
    assert len({reuse.digest(fields) for fields in lists}) == len(lists)


def test_only_committed_pages_are_reusable() -> None:
    store = make_store()
    tokens = list(range(8))
    writer = store.begin([], [], 0, signature=SIGNATURE)
    writer.reserve(8)
    writer.append(tokens)
    assert matched(store, tokens) == 0
    writer.commit(5)
    assert matched(store, tokens) == 4
    writer.commit(3)
    assert matched(store, tokens) == 8, "even before the seal"


def test_two_that_compute_the_same_keep_a_page_each_and_lose_none() -> None:
    store = make_store()
    nodes = [write(store, [1, 2, 3, 4]) for _ in range(2)]
    assert nodes[0].pages != nodes[1].pages
    store.unhold(nodes[0])
    assert matched(store, [1, 2, 3, 4]) == 4
    store.unhold(nodes[1])
    assert_all_pages_back(store)
    assert store.stats().pages_cached == 1


def test_looking_up_and_dropping_leaves_no_reference() -> None:
    store = make_store()
    store.unhold(write(store, list(range(8))))
    before = store.stats().pages_cached
    for _ in range(3):
        assert matched(store, list(range(8))) == 8
    assert store.stats().pages_cached == before
    assert_all_pages_back(store)


def test_a_preempted_writer_finds_its_own_pages_again() -> None:
    store = make_store()
    writer = store.begin([], [], 0, signature=SIGNATURE)
    writer.reserve(6)
    writer.append(range(6))
    writer.commit(6)
    pages = [extent.page for extent in writer.extents()]
    fence = store.begin_step()
    writer.rollback()
    assert writer.num_tokens == 0 and store.stats().pages_waiting == 2
    assert writer.match(range(6)) == 4
    store.end_step(fence)
    assert [extent.page for extent in writer.extents()] == pages[:1]
    writer.abort()
    assert_all_pages_back(store)


def test_matching_goes_on_behind_full_pages_only() -> None:
    store = make_store()
    write(store, list(range(8)))
    writer = store.begin([], [], 0, signature=SIGNATURE)
    assert writer.match(range(4)) == 4
    assert writer.match(range(4, 8)) == 4
    writer.reserve(1)
    with refused("match_misaligned"):
        writer.match([8])


def test_content_keys_are_stable_and_do_not_depend_on_the_store() -> None:
    keys = []
    for first in (0, 5):
        store = make_store()
        for _ in range(first):
            write(store, [3])
        keys.append(child(store, write(store, [1, 2, 3]), [4, 5]).content_key(2))
    assert keys[0] == keys[1]
    assert keys[0].hex().startswith("f37d63b6ddc80040")


def test_reuse_can_be_held_to_the_position_at_which_pages_were_computed() -> None:
    store = make_store(reuse_across_positions=False)
    fragment = list(range(50, 58))
    write(store, fragment, own_start=3)

    def found(own_start: int) -> int:
        writer = store.begin([], [], own_start, signature=SIGNATURE)
        reused = writer.match(fragment)
        writer.abort()
        return reused

    assert [found(own_start) for own_start in (5, 3, 0)] == [0, 8, 0]
    here, there = write(store, [1, 2, 3, 4], own_start=0), write(store, [1, 2, 3, 4], own_start=9)
    write(store, fragment, [Parent.inherit(here)], [Read(here, 0, 4, 20)], 40)

    def behind(source: NodeRecord, delta: int) -> int:
        writer = store.begin([Parent.inherit(source)], [Read(source, 0, 4, delta)], 40, signature=SIGNATURE)
        reused = writer.match(fragment)
        writer.abort()
        return reused

    assert (behind(here, 20), behind(there, 11)) == (8, 0), "equal text that was computed elsewhere"


def test_keys_are_digests_of_fields_whatever_is_put_together_ahead() -> None:
    """Directories on disk know pages by them."""
    store = make_store()
    source = write(store, [1, 2, 3, 4, 5])
    node = child(store, source, [6, 7])
    signature = [field for name, value in node.signature for field in (("signature", name), ("value", value))]
    fields = [(tag, text.encode()) for tag, text in [("salt", node.salt), *signature]]
    empty = reuse.digest(fields)
    read = [("source", source.content_key(5)), ("read", reuse.pack((0, 5, -5)))]
    assert source.context.key == empty and node.context.key == reuse.digest([*fields, *read])
    first = reuse.Prefix(node.context, (6, 7))
    assert first.key == reuse.digest([("before", node.context.key), ("page", reuse.pack([6, 7]))])
    assert node.content_key(2) == first.key and node.content_key(0) == node.context.key


def key_of_pages(node: NodeRecord, stop: int, size: int = 4) -> bytes:
    content: reuse.Context | reuse.Prefix = node.context
    for start in range(0, stop, size):
        content = reuse.Prefix(content, tuple(node.tokens[start : min(start + size, stop)]))
    return content.key


@pytest.mark.parametrize("asked", [(), (3, 11), (8, 14)], ids=["sealed", "while it grows", "ahead"])
def test_a_content_key_is_that_of_the_pages_whoever_worked_it_out(asked: Sequence[int]) -> None:
    """By committing, ahead of that, by matching, before a rollback, or by asking."""
    store = make_store()
    source = write(store, list(range(20, 27)))
    tokens = list(range(14))
    ways = [(tokens, False), ([*tokens[:8], 99, 98, 97, 96, 95, 94], False), (tokens, True)]
    for listed, rolls_back in ways:
        writer = store.begin([Parent.inherit(source)], [Read(source, 0, 7)], 7, signature=SIGNATURE)
        at = writer.match(listed)
        writer.reserve(len(listed) - at)
        writer.append(listed[at:])
        writer.look_ahead()
        for stop in asked:
            assert writer.node.content_key(stop) == key_of_pages(writer.node, stop)
        writer.commit(len(listed) - at)
        if rolls_back:
            writer.rollback()
            writer.reserve(len(listed))
            writer.append([5, *listed[1:]])
            writer.commit(len(listed))
        node = writer.seal()
        for stop in range(node.length + 1):
            assert node.content_key(stop) == key_of_pages(node, stop)
