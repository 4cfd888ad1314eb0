"""Files that change while the service runs: each way in which a change comes is seen, and what is broken changes
nothing."""

import asyncio
import logging
import os

import pytest

from penstock.clients.host.reloaded_files import FileError, FileWatch, NamedFile, TooEarly, WatchedFiles


def load(content, other=b""):
    if content.startswith(b"broken"):
        raise FileError(f"--file: is {content.decode()}; repair it")
    if content == b"bug":
        raise RuntimeError("an error of our own")
    return content + other


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"one")
    return path


@pytest.fixture
def watched(path):
    return WatchedFiles([NamedFile("--file", path)], load)


def refresh(watched):
    """Whether something new was taken into use."""
    take = watched.refresh()
    if take is not None:
        take()
    return take is not None


def look_twice(watched):
    """Whether something new was taken into use, which is never before the second look."""
    assert not refresh(watched)
    return refresh(watched)


def write_in_place(path):
    path.write_bytes(b"two")  # as long as before


def replace(path):
    new = path.with_name("new")
    new.write_bytes(b"two")
    new.replace(path)


def replace_with_an_old_file(path):
    replace(path)
    os.utime(path, (1, 1))


@pytest.mark.parametrize("change", [write_in_place, replace, replace_with_an_old_file])
def test_a_change_is_seen_once(watched, path, change):
    assert not refresh(watched)
    change(path)
    assert look_twice(watched)
    assert watched.value == b"two"
    assert not refresh(watched)


def test_a_link_that_points_elsewhere_is_seen_as_kubernetes_makes_it(tmp_path):
    for version, content in (("..1", b"one"), ("..2", b"two")):
        (tmp_path / version).mkdir()
        (tmp_path / version / "file").write_bytes(content)
    data, path = tmp_path / "..data", tmp_path / "file"
    data.symlink_to("..1")
    path.symlink_to("..data/file")
    watched = WatchedFiles([NamedFile("--file", path)], load)
    (tmp_path / "new").symlink_to("..2")
    (tmp_path / "new").replace(data)
    assert look_twice(watched)
    assert watched.value == b"two"


@pytest.mark.parametrize("is_created_anew", [False, True])
def test_half_of_what_is_being_written_is_not_used(watched, path, is_created_anew):
    if is_created_anew:
        path.unlink()
    with path.open("wb", buffering=0) as file:
        for part in (b"", b"t", b"wo"):
            file.write(part)
            assert not refresh(watched)
            assert watched.value == b"one"
    assert refresh(watched)
    assert watched.value == b"two"


def test_settled_files_are_not_read_again(watched, path, monkeypatch):
    monkeypatch.setattr("penstock.clients.host.reloaded_files._SETTLED_S", -1.0)
    assert not refresh(watched)  # from here on they are settled
    monkeypatch.setattr(NamedFile, "read", lambda file: pytest.fail("was read"))
    assert not refresh(watched)


def test_of_several_files_one_is_enough_and_all_are_loaded_together(tmp_path):
    for name in "ab":
        (tmp_path / name).write_text(name)
    watched = WatchedFiles([NamedFile("--file", tmp_path / name) for name in "ab"], load)
    assert watched.value == b"ab"
    (tmp_path / "b").write_text("B")
    assert look_twice(watched)
    assert watched.value == b"aB"


def test_a_broken_file_is_logged_once_and_changes_nothing(watched, path, caplog):
    path.write_bytes(b"broken")
    for _ in range(3):
        assert not refresh(watched)
    assert watched.value == b"one"
    assert [record.getMessage() for record in caplog.records] == [
        "--file: is broken; repair it; the previous content stays in use"
    ]
    path.write_bytes(b"broken in another way")
    assert not look_twice(watched)
    assert len(caplog.records) == 2
    path.write_bytes(b"two")
    assert look_twice(watched)
    assert watched.value == b"two"


def test_a_deleted_file_is_logged_once_and_changes_nothing(watched, path, caplog):
    path.unlink()
    for _ in range(3):
        assert not refresh(watched)
    assert [record.getMessage() for record in caplog.records] == [
        f"--file {path}: cannot be read (No such file or directory); check the path; the previous content stays in use"
    ]
    with caplog.at_level(logging.INFO):
        path.write_bytes(b"one")
        assert not refresh(watched)
    assert caplog.records[-1].getMessage() == f"--file {path}: has the content in use again"
    path.write_bytes(b"broken")
    assert not look_twice(watched)
    assert caplog.records[-1].levelno == logging.ERROR


def test_what_was_refused_is_not_loaded_again_before_it_changes(path, caplog):
    """A large file takes seconds."""
    loaded = []

    def load_and_count(content):
        loaded.append(content)
        return load(content)

    watched = WatchedFiles([NamedFile("--file", path)], load_and_count)
    path.write_bytes(b"broken")
    for _ in range(4):
        assert not refresh(watched)
    assert loaded == [b"one", b"broken"]
    path.write_bytes(b"one")
    assert not refresh(watched)
    path.write_bytes(b"broken")
    for _ in range(4):
        assert not refresh(watched)
    assert loaded == [b"one", b"broken", b"broken"]
    assert len(caplog.records) == 2


def test_what_was_too_early_is_tried_again_though_it_is_the_same(path):
    """A certificate that was not valid yet."""
    is_early = True

    def load_later(content):
        if content == b"two" and is_early:
            raise TooEarly("--file: too early")
        return content

    watched = WatchedFiles([NamedFile("--file", path)], load_later)
    path.write_bytes(b"two")
    assert not look_twice(watched)
    is_early = False
    assert refresh(watched)
    assert watched.value == b"two"


def test_an_error_of_our_own_is_logged_once_and_changes_nothing(watched, path, caplog, monkeypatch):
    monkeypatch.setattr("penstock.clients.host.reloaded_files._SETTLED_S", -1.0)
    path.write_bytes(b"bug")
    for _ in range(3):
        assert not refresh(watched)
    assert watched.value == b"one"
    assert len(caplog.records) == 1


def test_an_error_while_reading_is_logged_once_and_passes(watched, path, caplog, monkeypatch):
    def fail(file):
        raise MemoryError

    path.write_bytes(b"two")
    with monkeypatch.context() as patch:
        patch.setattr(NamedFile, "read", fail)
        for _ in range(2):
            assert not refresh(watched)
    [record] = caplog.records
    assert "could not be applied (MemoryError); the previous content stays in use" in record.getMessage()
    assert look_twice(watched)
    assert watched.value == b"two"


def test_a_file_that_cannot_be_used_at_the_start_is_an_error(tmp_path):
    with pytest.raises(FileError, match=r"^--file .*missing: cannot be read \(No such file or directory\)"):
        WatchedFiles([NamedFile("--file", tmp_path / "missing")], load)
    with pytest.raises(FileError, match="is not UTF-8 text"):
        NamedFile("--file", tmp_path / "bytes").text(b"\xff")


async def test_the_watch_takes_changes_into_use_on_the_loop(watched, path):
    taken: asyncio.Queue[bytes] = asyncio.Queue()
    loop = asyncio.get_running_loop()

    def take(value):
        assert asyncio.get_running_loop() is loop
        taken.put_nowait(value)

    watched.on_change = take
    watch = FileWatch([watched], interval_s=0.01)
    watch.start()
    path.write_bytes(b"two")
    assert await asyncio.wait_for(taken.get(), 120) == b"two"
    path.write_bytes(b"three")
    assert await asyncio.wait_for(taken.get(), 120) == b"three"
    watch.stop()


async def test_the_watch_need_not_wait_for_its_interval():
    looked, loop = asyncio.Event(), asyncio.get_running_loop()

    class Looks:
        def refresh(self):
            loop.call_soon_threadsafe(looked.set)

    watch = FileWatch([Looks()], interval_s=3600)
    watch.start()
    watch.check_now()
    await asyncio.wait_for(looked.wait(), 120)
    watch.stop()


async def test_one_that_cannot_be_looked_at_does_not_end_the_watch(watched, path, caplog):
    class Failing:
        def refresh(self):
            raise MemoryError

    taken = asyncio.Event()
    watched.on_change = lambda value: taken.set()
    watch = FileWatch([Failing(), watched], interval_s=0.01)
    watch.start()
    path.write_bytes(b"two")
    await asyncio.wait_for(taken.wait(), 120)
    assert "a file could not be checked" in caplog.text
    watch.stop()


async def test_one_that_cannot_be_taken_into_use_does_not_end_the_watch(tmp_path, caplog):
    files, taken = [], asyncio.Event()
    for name in "ab":
        (tmp_path / name).write_text("one")
        files.append(WatchedFiles([NamedFile("--file", tmp_path / name)], load))

    def fail(value):
        raise RuntimeError("an error of our own")

    files[0].on_change = fail
    files[1].on_change = lambda value: taken.set()
    watch = FileWatch(files, interval_s=0.01)
    watch.start()
    for name in "ab":
        (tmp_path / name).write_text("two")
    await asyncio.wait_for(taken.wait(), 120)
    assert "could not be applied" in caplog.text
    watch.stop()
