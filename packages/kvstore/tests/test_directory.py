from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import IO

import pytest
from kvstore_disk import LAYOUT, PAGE_BYTES, base, content, directory, get, key, put, tokens
from kvstore_helpers import refused

from dagengine_kvstore import Read, page_file
from dagengine_kvstore.directory import PageDirectory
from dagengine_kvstore.reuse import ContentTable


def files(path: Path) -> list[Path]:
    return sorted(path.glob("??/*.page"), key=lambda file: file.stat().st_mtime_ns)


def test_pages_come_back_with_their_base_and_outlive_the_process(tmp_path: Path) -> None:
    first = directory(tmp_path)
    assert not first.holds(key(1)) and get(first, 1) is None
    for number in range(9):
        assert put(first, number)
    assert first.holds(key(1)) and first.num_pages == 9
    second = directory(tmp_path)
    assert (second.num_pages, second.num_bytes) == (9, first.num_bytes)
    assert second.num_bytes == sum(file.stat().st_size for file in files(tmp_path))
    for number in range(9):
        assert second.holds(key(number)) and get(second, number) == content(number)
    assert put(second, 3) and second.num_pages == 9, "what is there is not written again"


def test_a_page_is_found_under_its_tokens_key_and_layout_only(tmp_path: Path) -> None:
    pages = directory(tmp_path)
    put(pages, 7)
    payload = memoryview(bytearray(PAGE_BYTES))
    assert pages.get(key(7), (*tokens(7)[:-1], 99), payload) is None, "the token ids are compared on a hit"
    assert pages.get(key(7), tokens(7)[:-1], payload) is None
    assert pages.get(key(8), tokens(7), payload) is None
    other = PageDirectory(tmp_path, PAGE_BYTES, 10**6, layout=LAYOUT | {"page_size": "8"})
    assert other.get(key(7), tokens(7), payload) is None
    smaller = PageDirectory(tmp_path, PAGE_BYTES - 8, 10**6, layout=LAYOUT)
    assert smaller.get(key(7), tokens(7), payload[8:]) is None
    assert get(pages, 7) == content(7), "none of this removed the page"


def test_one_tenants_pages_are_never_found_under_another_salt(tmp_path: Path) -> None:
    contents = ContentTable()
    found: set[bytes] = set()
    for signature in ((("weights", "a"),), (("weights", "b"),)):
        for salt in ("", "tenant", "tenant2"):
            reads: tuple[Read, ...] = ()
            found.add(contents.extend(contents.context(signature, salt, reads, 0), (1, 2, 3)).key)
    assert len(found) == 6 and {len(key) for key in found} == {32}
    pages = directory(tmp_path)
    mine, *others = sorted(found)
    pages.put(mine, (1, 2, 3), 0, memoryview(content(1)))
    payload = memoryview(bytearray(PAGE_BYTES))
    assert [pages.get(other, (1, 2, 3), payload) for other in others] == [None] * 5
    assert pages.get(mine, (1, 2, 3), payload) == 0


def torn(whole: bytes, count: int) -> dict[str, bytes]:
    """The ways in which a file can be wrong, at every field's border, inside every field, and behind the end."""
    head = page_file.num_bytes(0, 0) - page_file.DIGEST_BYTES
    borders = [
        0,
        8,
        12,
        16,
        24,
        32,
        64,
        head,
        head + 8 * count,
        len(whole) - page_file.DIGEST_BYTES,
        len(whole),
    ]
    wrong: dict[str, bytes] = {"longer": whole + b"\0", "twice": whole * 2, "zeros": bytes(len(whole))}
    for begin, end in pairwise(borders):
        for at in {begin, (begin + end) // 2, end - 1}:
            wrong[f"cut at {at}"] = whole[:at]
            wrong[f"zeros from {at}"] = whole[:at] + bytes(len(whole) - at)
            wrong[f"byte {at}"] = whole[:at] + bytes([whole[at] ^ 0x10]) + whole[at + 1 :]
        wrong[f"field at {begin}"] = whole[:begin] + os.urandom(end - begin) + whole[end:]
        wrong[f"without field at {begin}"] = whole[:begin] + whole[end:]
    return {name: data for name, data in wrong.items() if data != whole}


def test_a_torn_foreign_or_changed_file_is_never_served_and_is_removed(tmp_path: Path) -> None:
    pages = directory(tmp_path)
    put(pages, 5)
    (file,) = files(tmp_path)
    whole = file.read_bytes()
    cases = torn(whole, len(tokens(5)))
    assert len(cases) > 100
    for name, data in cases.items():
        file.write_bytes(data)
        pages = directory(tmp_path)
        assert get(pages, 5) is None, name
        assert not file.exists() and not pages.holds(key(5)) and pages.num_bytes == 0, name
        assert put(pages, 5) and file.read_bytes() == whole, name


def test_a_whole_page_under_anothers_name_is_not_served(tmp_path: Path) -> None:
    pages = directory(tmp_path)
    put(pages, 5)
    (fifth,) = files(tmp_path)
    put(pages, 6)
    (sixth,) = [file for file in files(tmp_path) if file != fifth]
    sixth.write_bytes(fifth.read_bytes())
    payload = memoryview(bytearray(PAGE_BYTES))
    assert pages.get(key(6), tokens(5), payload) is None
    assert not sixth.exists() and get(pages, 5) == content(5)


def test_what_is_not_ours_is_left_alone(tmp_path: Path) -> None:
    strangers = [tmp_path / "notes.txt", tmp_path / "ab" / "notes.txt", tmp_path / "ab" / "x.page"]
    for stranger in strangers:
        stranger.parent.mkdir(exist_ok=True)
        stranger.write_text("mine")
    pages = directory(tmp_path, pages=2)
    for number in range(6):
        put(pages, number)
    assert all(stranger.exists() for stranger in strangers)
    assert pages.num_pages == len(files(tmp_path)) - 1 == 2


def test_the_least_recently_used_pages_make_room(tmp_path: Path) -> None:
    pages = directory(tmp_path, pages=3)
    for number in (3, 7, 11):  # 4 tokens each
        put(pages, number)
    get(pages, 3)
    put(pages, 15)
    assert [number for number in (3, 7, 11, 15) if get(pages, number)] == [3, 11, 15]
    again = directory(tmp_path, pages=3)
    put(again, 19)
    assert [number for number in (3, 7, 11, 15, 19) if get(again, number)] == [11, 15, 19]
    assert again.num_bytes <= again.max_bytes
    tiny = PageDirectory(tmp_path / "tiny", PAGE_BYTES, PAGE_BYTES, layout=LAYOUT)
    assert not put(tiny, 1) and files(tmp_path / "tiny") == []


def test_a_start_that_comes_between_a_files_creation_and_its_lock_loses_no_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pages = directory(tmp_path)
    lock, starts = fcntl.flock, []

    def start_first(file: IO[bytes], operation: int) -> None:
        if not starts and operation == fcntl.LOCK_EX:
            starts.append(len(list((tmp_path / "tmp").iterdir())))
            directory(tmp_path)
        lock(file, operation)

    monkeypatch.setattr(fcntl, "flock", start_first)
    assert put(pages, 1)
    assert starts == [1] and get(pages, 1) is not None
    assert not list((tmp_path / "tmp").iterdir())


def test_processes_share_a_directory_and_keep_its_budget(tmp_path: Path) -> None:
    script = (
        "import sys; sys.path.insert(0, sys.argv[1]); from kvstore_disk import *\n"
        "pages = directory(sys.argv[2], pages=40)\n"
        "for number in range(int(sys.argv[3]), 200, 3):\n"
        "    put(pages, number); get(pages, (7 * number) % 200)\n"
    )
    command = [sys.executable, "-c", script, str(Path(__file__).parent), str(tmp_path)]
    environment = dict(os.environ) | {"PYTHONPATH": os.pathsep.join(map(str, sys.path))}
    running = [subprocess.Popen([*command, str(first)], env=environment) for first in range(3)]
    assert [process.wait(60) for process in running] == [0, 0, 0]
    size = sum(file.stat().st_size for file in files(tmp_path))
    pages = directory(tmp_path, pages=40)
    assert size <= pages.max_bytes * (1 + 3 / 16)
    assert sum(get(pages, number) is not None for number in range(200)) == pages.num_pages > 20
    assert list((tmp_path / "tmp").iterdir()) == []


def test_a_start_removes_what_dead_writers_left_and_nothing_that_is_being_written(tmp_path: Path) -> None:
    directory(tmp_path)
    left, written = tmp_path / "tmp" / "left", tmp_path / "tmp" / "written"
    left.write_bytes(b"torn")
    with open(written, "wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        directory(tmp_path)
        assert not left.exists() and written.exists()
    directory(tmp_path)
    assert not written.exists()


def test_a_page_that_cannot_be_written_is_absent_and_its_bytes_are_let_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pages = directory(tmp_path)
    let_go: list[int] = []
    whole = page_file.write

    def full_disk(file: object, *arguments: object) -> None:
        whole(file, *arguments)  # type: ignore[arg-type]
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(page_file, "write", full_disk)
    for _ in range(2):
        with pytest.raises(OSError, match="No space left"):
            pages.put(key(1), tokens(1), base(1), memoryview(content(1)), consumed=lambda: let_go.append(1))
    assert let_go == [1, 1]
    assert list((tmp_path / "tmp").iterdir()) == [] and get(pages, 1) is None
    monkeypatch.undo()
    for count in (3, 4):  # written, then found
        pages.put(key(1), tokens(1), base(1), memoryview(content(1)), consumed=lambda: let_go.append(1))
        assert let_go == [1] * count and get(pages, 1) == content(1)


def test_sizes_below_one_are_refused(tmp_path: Path) -> None:
    for sizes, field in (((0, 1), "page_bytes"), ((1, 0), "max_bytes")):
        with refused("invalid_size", field):
            PageDirectory(tmp_path, *sizes, layout=LAYOUT)


KILLS = 200
KILL_SCRIPT = """
import os, random, signal, sys, time
sys.path.insert(0, sys.argv[1])
from kvstore_disk import *

path, kills, rng = sys.argv[2], int(sys.argv[3]), random.Random(int(sys.argv[4]))
from pathlib import Path
from typing import IO

numbers, served, interrupted = range(40), 0, 0
for kill in range(kills):
    begun, begin = os.pipe()
    writer = os.fork()
    if not writer:
        try:
            pages = directory(path, pages=25)
            os.write(begin, b"!")
            while True:
                put(pages, rng.choice(numbers))
                rng.random()
        finally:
            os._exit(3)
    os.read(begun, 1)
    time.sleep(rng.random() * 0.004)
    os.kill(writer, signal.SIGKILL)
    _, status = os.waitpid(writer, 0)
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL, status
    os.close(begun); os.close(begin)
    interrupted += any((Path(path) / "tmp").iterdir())
    pages = directory(path, pages=25)
    assert not any((Path(path) / "tmp").iterdir())
    assert pages.num_bytes <= pages.max_bytes
    served += sum(get(pages, number) is not None for number in rng.sample(numbers, 5))
    rng.seed(kill)
print(served, interrupted)
"""


def test_after_kill_9_in_the_middle_of_writes_a_page_is_right_or_absent(tmp_path: Path) -> None:
    """200 kills; a writer in a process of its own is killed after a random time, then everything found is compared."""
    done = subprocess.run(
        [sys.executable, "-c", KILL_SCRIPT, str(Path(__file__).parent), str(tmp_path), str(KILLS), "1"],
        env=dict(os.environ) | {"PYTHONPATH": os.pathsep.join(map(str, sys.path))},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    served, interrupted = map(int, done.stdout.split())
    assert served >= KILLS, "pages survive"
    assert interrupted >= KILLS // 10, "kills hit the middle of a write"
