"""Files and folders appear whole or not at all, and the user's own files stay."""

import errno
import os
import stat
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest

from tokenformer_vit.errors import InputError
from tokenformer_vit.files import (
    locked_folder,
    new_folder,
    remove_leftovers,
    results_folder,
    temporary_name,
    write_whole,
)

posix = pytest.mark.skipif(sys.platform == "win32", reason="modes and links of POSIX")


@pytest.fixture
def umask():
    before = os.umask(0o027)
    yield 0o027
    os.umask(before)


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


@posix
def test_a_file_has_the_mode_that_the_umask_allows(tmp_path, umask):
    write_whole(tmp_path / "file", b"content")
    assert mode(tmp_path / "file") == 0o666 & ~umask
    with new_folder(tmp_path / "folder") as partial:
        (partial / "inner").write_bytes(b"content")
        (partial / "inner").chmod(0o600)  # as safetensors does
    assert mode(tmp_path / "folder" / "inner") == 0o666 & ~umask
    assert mode(tmp_path / "folder") == 0o777 & ~umask


@posix
def test_a_link_is_replaced_and_its_target_stays(tmp_path):
    (tmp_path / "target").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "target")
    write_whole(tmp_path / "link", b"new")
    assert not (tmp_path / "link").is_symlink()
    assert (tmp_path / "target").read_text() == "mine"


def test_names_cannot_be_guessed_and_old_ones_are_not_followed(tmp_path, monkeypatch):
    names = {temporary_name(tmp_path / "file") for _ in range(100)}
    assert len(names) == 100
    taken = next(iter(names))
    taken.write_text("mine")
    monkeypatch.setattr("tokenformer_vit.files.temporary_name", lambda path: taken)
    with pytest.raises(FileExistsError):
        write_whole(tmp_path / "file", b"new")


def test_writers_at_once_leave_one_whole_file(tmp_path):
    contents = [bytes([index]) * 200_000 for index in range(8)]
    threads = [
        threading.Thread(target=write_whole, args=(tmp_path / "file", content, False))
        for content in contents
        for _ in range(5)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (tmp_path / "file").read_bytes() in contents
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_an_error_while_writing_leaves_what_was_there(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "a").write_text("old")

    def fail():
        with new_folder(tmp_path / "folder") as partial:
            (partial / "a").write_text("new")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert (tmp_path / "folder" / "a").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]
    with pytest.raises(OSError, match="absent"):
        write_whole(tmp_path / "absent" / "file", b"")


def test_a_folder_that_is_there_keeps_its_other_files(tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "mine").write_text("mine")
    with new_folder(folder) as partial:
        (partial / "a").write_text("new")
    assert {path.name: path.read_text() for path in folder.iterdir()} == {
        "mine": "mine",
        "a": "new",
    }


@posix
def test_leftovers_of_the_dead_go_and_all_else_stays(tmp_path):
    dead = subprocess.run(
        [sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True
    )
    own = temporary_name(tmp_path / "file")
    left = own.with_name(own.name.replace(f"-{os.getpid()}-", f"-{int(dead.stdout)}-"))
    elsewhere = own.with_name(own.name.replace(own.name[13:21], "0" * 8))
    keep = [own, elsewhere, *(tmp_path / name for name in (".file.partial", "x.partial"))]
    for path in (left, *keep):
        path.write_text("part")
    folder = left.with_name(left.name.replace(left.name[-24:-8], "1" * 16))
    folder.mkdir()
    (folder / "file").write_text("part")
    target = tmp_path / "target"
    target.mkdir()
    link = left.with_name(left.name.replace(left.name[-24:-8], "2" * 16))
    link.symlink_to(target)
    (target / "mine").write_text("mine")
    remove_leftovers(tmp_path)
    assert set(tmp_path.iterdir()) == {*keep, target}
    assert (target / "mine").exists()
    os.utime(elsewhere, (0, 0))  # of another machine, and older than a day
    remove_leftovers(tmp_path)
    assert not elsewhere.exists()


HOLDER = """
import sys, time
sys.modules["__main__"].__file__ = "/bin/tokenformer-vit"  # which does not import PyTorch
from pathlib import Path
from tokenformer_vit.files import locked_folder
with locked_folder(Path(sys.argv[1])):
    if {fork}:
        import os
        if os.fork() == 0:
            time.sleep(60)
    print("held", flush=True)
    sys.stdin.read()
"""


@posix
@pytest.mark.parametrize("fork", [False, True])
def test_a_lock_excludes_others_and_ends_with_a_kill(tmp_path, fork):
    code = textwrap.dedent(HOLDER).format(fork=fork)
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as holder:
        assert holder.stdout.readline() == "held\n"
        with (
            pytest.raises(InputError, match=rf"in use by process {holder.pid} on .*--work-dir"),
            locked_folder(tmp_path),
        ):
            pass
        holder.kill()
        holder.wait()
        with locked_folder(tmp_path):  # although a child of the killed one may still live
            pass
        if fork:
            os.killpg(holder.pid, 9)


@posix
def test_a_lock_is_not_written_through_a_link(tmp_path):
    (tmp_path / "mine").write_text("mine")
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / ".lock").symlink_to(tmp_path / "mine")
    with pytest.raises(OSError, match=r"\.lock"), locked_folder(folder):
        pass
    assert (tmp_path / "mine").read_text() == "mine"


@posix
def test_a_folder_that_is_a_link_gets_its_files_where_it_points(tmp_path, monkeypatch):
    """Its target may be on another disk, and a rename does not work between disks."""
    elsewhere = tmp_path / "elsewhere"
    (elsewhere / "run").mkdir(parents=True)
    (tmp_path / "run").symlink_to(elsewhere / "run")
    moved, replace = [], os.replace
    monkeypatch.setattr(os, "replace", lambda a, b: (moved.append(a), replace(a, b)))
    with new_folder(tmp_path / "run") as partial:
        (partial / "a").write_text("new")
        assert partial.resolve().is_relative_to(elsewhere / "run")
    assert (elsewhere / "run" / "a").read_text() == "new"
    assert [path.name for path in (elsewhere / "run").iterdir()] == ["a"]


@pytest.mark.parametrize("there", [False, True])
@pytest.mark.parametrize("fails", ["mkdir", "rename"])
def test_an_error_names_the_folder_and_not_its_partial_one(there, fails, tmp_path, monkeypatch):
    folder = tmp_path / "run"
    if there:
        folder.mkdir()

    def fail(path, *arguments, **how):
        if how:  # a mkdir of parents
            return
        raise OSError(errno.EACCES, "Permission denied", str(path))

    def write():
        with new_folder(folder) as partial:
            (partial / "a").write_text("new")
            monkeypatch.setattr(Path, "rename", fail)
            monkeypatch.setattr(os, "replace", fail)

    if fails == "mkdir":
        monkeypatch.setattr(Path, "mkdir", fail)
    with pytest.raises(OSError, match="Permission denied") as raised:
        write()
    monkeypatch.undo()
    at = folder / "a" if there and fails == "rename" else folder
    assert raised.value.filename == str(at)
    assert [path.name for path in tmp_path.iterdir()] == ["run"] * there


def test_a_folder_for_results_goes_after_an_error_if_it_is_empty(tmp_path):
    def run(folder, name=None):
        with results_folder(folder, "--out"):
            if name:
                (folder / name).touch()
            raise ZeroDivisionError

    (tmp_path / "mine").mkdir()
    for folder, name in (("mine", None), ("deep/out", None), ("half/out", "a")):
        with pytest.raises(ZeroDivisionError):
            run(tmp_path / folder, name)
    assert {path.name for path in tmp_path.iterdir()} == {"mine", "half"}
    assert (tmp_path / "half/out/a").is_file()
    with pytest.raises(InputError, match="choose another --out"):
        run(tmp_path / "half/out/a/b")
    with results_folder(tmp_path / "deep/out", "--out"):
        pass
    assert (tmp_path / "deep/out").is_dir()


@pytest.mark.parametrize("there", ["a file", "a broken link"])
def test_what_is_no_folder_is_named(there, tmp_path):
    target = tmp_path / "out"
    if there == "a file":
        target.write_text("mine")
    else:
        target.symlink_to(tmp_path / "nowhere")
    with pytest.raises(OSError, match="Not a directory") as raised, new_folder(target):
        pytest.fail("there is nothing to write into")
    assert raised.value.filename == str(target)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_the_current_folder_can_be_written_into(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with new_folder(Path(".")) as partial:
        (partial / "a").write_text("new")
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
