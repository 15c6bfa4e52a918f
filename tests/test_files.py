"""Files and folders are complete or absent; a folder belongs to one process at a time."""

import multiprocessing
import os
import sys
from contextlib import nullcontext

import pytest

from tokenformer_vit.errors import InputError
from tokenformer_vit.files import locked_folder, make_folder, new_folder, whole_file, write_whole
from tokenformer_vit.records import environment, read_json, write_record


def hold_lock(folder, pipe):
    with locked_folder(folder):
        if os.fork():  # the child is a data loading worker, which lives on for a while
            pipe.send("ready")
        pipe.poll(30)


def test_an_error_while_writing_leaves_what_was_there(tmp_path):
    write_whole(tmp_path / "a", b"old")
    with pytest.raises(TypeError), whole_file(tmp_path / "a") as file:
        file.write(file.write(b"half"))  # a number is not bytes
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == {"a": b"old"}


@pytest.mark.parametrize("there", [False, True])
def test_a_folder_gets_its_files_at_the_end(there, tmp_path):
    folder = tmp_path / "x" / "out"
    if there:
        folder.mkdir(parents=True)
        (folder / "a").write_text("old")
        (folder / "b").write_text("kept")
    with locked_folder(folder) if there else nullcontext(), new_folder(folder) as partial:
        (partial / "a").write_text("new")
        (partial / "a").chmod(0o600)
        assert not there or (folder / "a").read_text() == "old"
    assert (folder / "a").read_text() == "new"
    assert (folder / "a").stat().st_mode & 0o044  # as the umask allows
    assert {each.name for each in folder.iterdir()} == {"a", *["b", ".lock"] * there}
    assert [each.name for each in folder.parent.iterdir()] == ["out"]


@pytest.mark.parametrize("there", [False, True])
def test_of_two_writers_each_writes_a_whole(there, tmp_path):
    """Interleaved as two processes would be; the last to end leaves its files."""
    file, folder = tmp_path / "file", tmp_path / "folder"
    if there:
        folder.mkdir()
    with whole_file(file) as first, new_folder(folder) as one:
        first.write(b"first ")
        with whole_file(file) as second, new_folder(folder) as other:
            second.write(b"second")
            for partial, text in ((one, "first"), (other, "second")):
                (partial / "a").write_text(text)
                (partial / "b").write_text(text)
        assert file.read_bytes() == b"second"
        assert [(folder / name).read_text() for name in "ab"] == ["second"] * 2
        first.write(b"again")
    assert file.read_bytes() == b"first again"
    assert [(folder / name).read_text() for name in "ab"] == ["first"] * 2
    assert file.stat().st_mode & 0o044
    assert {each.name for each in tmp_path.iterdir()} == {"file", "folder"}


def test_names_of_partial_files_are_no_trap(tmp_path, monkeypatch):
    """A link or a folder that waits there is neither followed nor deleted."""
    monkeypatch.setattr("secrets.token_hex", lambda _: "00000000")
    (tmp_path / ".a.00000000.partial").symlink_to(tmp_path / "mine")
    (tmp_path / ".b.00000000.partial").mkdir()
    with pytest.raises(FileExistsError):
        write_whole(tmp_path / "a", b"data")
    with pytest.raises(FileExistsError), new_folder(tmp_path / "b"):
        pass
    assert not (tmp_path / "mine").exists()
    assert (tmp_path / ".a.00000000.partial").is_symlink()


def test_a_folder_that_cannot_be_made_names_the_option(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match=r"cannot make .*file.*: choose another --out"):
        make_folder(tmp_path / "file", "--out")


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no fork")
def test_a_lock_excludes_others_and_ends_with_a_kill(tmp_path):
    fork = multiprocessing.get_context("fork")
    ours, its = fork.Pipe()
    process = fork.Process(target=hold_lock, args=(tmp_path, its))
    process.start()
    assert ours.recv() == "ready"
    with pytest.raises(InputError, match="in use: wait, or"), locked_folder(tmp_path):
        pass
    (tmp_path / ".a.0123abcd.partial").touch()  # what it was writing
    process.kill()
    process.join()
    with locked_folder(tmp_path):
        assert not list(tmp_path.glob("*.partial"))
    ours.send("end")


def test_records(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["/bin/tokenformer-vit", "train", "a b.py"])
    here = environment("cpu")
    assert here["command"] == "tokenformer-vit train 'a b.py'"
    assert {"python", "torch", "timm"} <= here["versions"].keys()
    record = {"name": "[\n1", "seconds": [1, 2.5], "texts": ["a", "b"], **here}
    write_record(tmp_path / "a.json", record)
    assert '"seconds": [1, 2.5],\n' in (tmp_path / "a.json").read_text()
    assert read_json(tmp_path / "a.json") == record
    (tmp_path / "a.json").write_text("{")
    with pytest.raises(InputError, match=r"a\.json is not JSON"):
        read_json(tmp_path / "a.json")
