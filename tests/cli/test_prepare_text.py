"""tools/prepare_text.py as a user starts it, with and without interruptions."""

import io
import json
import os
import shutil
import signal
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("transformers", reason="pip install '.[language]'")
pytest.importorskip("datasets", reason="pip install '.[language]'")

from tokenformer_vit import language
from tokenformer_vit.cli import prepare_text
from tokenformer_vit.command_line import run_tool
from tokenformer_vit.errors import InputError
from tokenformer_vit.language import load_tokenizer, open_rows, preparation, read_text_meta

ROOT = Path(__file__).resolve().parents[2]


def run(*arguments):
    prepare_text.main([str(argument) for argument in arguments])


def tokens(folder, split):
    rows = open_rows(folder, split)[:]["input_ids"]
    return np.concatenate([rows[:1, 0], rows[:, 1:].ravel()])


def contents(folder):
    return {file.name: file.read_bytes() for file in folder.iterdir()}


@pytest.fixture
def texts(tmp_path):
    """Two files of text and one of rows, 60 kB."""
    folder = tmp_path / "texts"
    folder.mkdir()
    for name in ("a", "b"):
        lines = "".join(f"{name} says {number * number} é\n" for number in range(1200))
        (folder / f"{name}.txt").write_text(lines)
    rows = (json.dumps({"text": f"row {number} " * 4, "id": number}) for number in range(400))
    (folder / "c.jsonl").write_text("\n".join(rows))
    (folder / "notes").write_text("not of a known kind")
    return folder


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe:300"])
def test_what_is_written_is_the_text(texts, tmp_path, capsys, tokenizer):
    how = ("--tokenizer", tokenizer, "--val-share", 0.1, "--context-length", 16)
    run(texts, tmp_path / "new" / "out", *how)
    printed = capsys.readouterr().out
    folder = tmp_path / "new" / "out"
    meta = read_text_meta(folder)
    reader = load_tokenizer(folder)
    assert meta["vocab_size"] == len(reader) <= 300
    assert meta.get("end") == reader.eos_token_id
    assert meta["splits"]["train"]["documents"] + meta["splits"]["val"]["documents"] == 404
    size = sum((texts / f"{name}.txt").stat().st_size for name in "ab")
    size += sum(len(f"row {number} " * 4) for number in range(400))
    assert size == sum(split["bytes"] for split in meta["splits"].values())

    train = tokens(folder, "train")
    assert f"train: {meta['splits']['train']['rows']:,} rows of 17 tokens" in printed
    assert (
        len(train) + meta["splits"]["train"].get("left_over", 0)
        == meta["splits"]["train"]["tokens"]
    )
    found = reader.decode(train).split("<|endoftext|>")
    whole = [(texts / f"{name}.txt").read_text() for name in "ab"]
    assert whole[0].startswith(found[0])
    assert whole[1].startswith(found[1])
    assert whole[0].endswith(reader.decode(tokens(folder, "val")).split("<|endoftext|>")[0])
    assert found[2].startswith("row ")
    assert {path.name for path in folder.parent.iterdir()} == {"out"}

    before = contents(folder)
    run(texts, folder, *how)
    assert "There already" in capsys.readouterr().out
    assert contents(folder) == before
    with pytest.raises(InputError, match=r"\(context_length: 16, now 32\): give the same"):
        run(texts, folder, *how[:-1], 32)


def test_an_interruption_changes_nothing(texts, tmp_path, monkeypatch):
    monkeypatch.setattr(preparation, "_BATCH", 3000)
    how = (texts, "--val-share", 0.1, "--context-length", 16, "--shard-tokens", 5000)
    run(*how, tmp_path / "whole")
    assert len(list((tmp_path / "whole").glob("train-*.arrow"))) >= 4
    assert len(list((tmp_path / "whole").glob("val-*.arrow"))) >= 2

    real = preparation._batch
    again = []

    def interrupted(pieces):
        again[-1] += 1
        if again[-1] == 4:
            raise KeyboardInterrupt
        return real(pieces)

    monkeypatch.setattr(preparation, "_batch", interrupted)
    done = False
    while not done:
        again.append(0)
        assert len(again) < 20
        try:
            run(*how, tmp_path / "cut")
            done = True
        except KeyboardInterrupt:
            with pytest.raises(InputError, match="is not finished: run the same"):
                open_rows(tmp_path / "cut", "train")
            with pytest.raises(InputError, match=r"cut\.partial .*val_share: 0\.1, now 0\.2"):
                run(*how, tmp_path / "cut", "--val-share", 0.2)
    assert len(again) > 3
    assert contents(tmp_path / "cut") == contents(tmp_path / "whole")


@pytest.mark.parametrize("unfinished", [False, True])
@pytest.mark.parametrize("edited", ["texts/a.txt", "tokenizer/tokenizer.json"])
@pytest.mark.parametrize("named", ["tokenizer", "tokenizer/tokenizer.json"])
def test_an_edited_file_of_the_same_size_is_noticed(
    texts, tmp_path, monkeypatch, named, edited, unfinished
):
    monkeypatch.chdir(tmp_path)
    language.byte_tokenizer().save_pretrained("tokenizer")
    how = ("texts/a.txt", "out", "--tokenizer", named, "--context-length", 16, "--val-share", 0.1)
    if unfinished:
        with monkeypatch.context() as patch:
            patch.setattr(Path, "rename", lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                run(*how)
    else:
        run(*how)
    made = tmp_path / ("out.partial" if unfinished else "out")
    before, whole = contents(made), Path(edited).read_text()
    Path(edited).write_text(whole.replace("a", "b", 1))
    with pytest.raises(InputError, match=rf"{made.name} was made with other settings \(\w*files: "):
        run(*how)
    assert before.items() <= contents(made).items()
    Path(edited).write_text(whole)
    run(*how)  # edited back
    assert Path("out").is_dir()


def test_tokens_of_an_earlier_version_are_refused_and_kept(texts, tmp_path):
    how = (texts, tmp_path / "out", "--context-length", 16, "--val-share", 0.1)
    run(*how)
    file = tmp_path / "out" / "meta.json"
    meta = json.loads(file.read_text())
    meta["settings"]["files"] = "0123456789abcdef"  # of names and sizes
    file.write_text(json.dumps(meta))
    before = contents(tmp_path / "out")
    with pytest.raises(InputError, match=r"files: 0123456789abcdef, now .* choose another place"):
        run(*how)
    assert contents(tmp_path / "out") == before


def test_tokens_among_the_texts_are_not_read(texts, tmp_path, monkeypatch):
    monkeypatch.setattr(preparation, "_BATCH", 3000)
    how = (texts, "--val-share", 0.1, "--context-length", 16, "--shard-tokens", 5000)
    run(*how, tmp_path / "outside")
    files = language.find_files(texts)
    real, batches = preparation._batch, iter(range(9))

    def interrupted(pieces):
        if next(batches) == 4:  # after a shard
            raise KeyboardInterrupt
        return real(pieces)

    with monkeypatch.context() as patch:
        patch.setattr(preparation, "_batch", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run(*how, texts / "deep" / "tokens")
    assert list((texts / "deep" / "tokens.partial").glob("*.arrow"))
    run(*how, texts / "other")  # next to an unfinished one
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        run(*how, Path("texts", "deep", "tokens"))
    run(*how, texts / "deep" / "more")
    for folder in ("other", "deep/tokens", "deep/more"):
        assert contents(texts / folder) == contents(tmp_path / "outside")

    early = texts / "early.partial"  # of a run that was killed at once
    early.mkdir()
    (early / "tokenizer.json").write_text("{}")
    assert language.find_files(texts, texts / "early") == files
    (early / "meta.json").write_text("{}")  # of somebody else
    assert language.find_files(texts) == sorted(
        [*files, early / "meta.json", early / "tokenizer.json"]
    )


def test_nothing_finished_binds_to_nothing(texts, tmp_path):
    (texts / "b.txt").write_bytes(b"caf\xe9")
    with pytest.raises(InputError, match=r"b\.txt is not UTF-8 text: byte 3 "):
        run(texts, tmp_path / "out", "--context-length", 16)
    run(texts / "a.txt", tmp_path / "out", "--context-length", 8, "--val-share", 0)
    assert list(read_text_meta(tmp_path / "out")["splits"]) == ["train"]


def files_below(folder):
    return {path.name: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def write_progress(folder, **changes):
    begun = {"settings": {}, "position": None, "splits": {}, "files": []}
    (folder / "progress.json").write_text(json.dumps({**begun, **changes}))


@pytest.mark.parametrize(
    "change",
    [
        lambda folder: None,
        write_progress,  # begun, and then used by somebody for something else
        lambda folder: write_progress(folder, files=["../texts/a.txt"]),
        lambda folder: write_progress(folder, position={"source": 9, "state": None}),
        lambda folder: write_progress(folder, position={"source": 10**30, "state": None}),
        lambda folder: write_progress(folder, splits={"train": {}}),
        lambda folder: (folder / "progress.json").write_text("[" * 9999),
        lambda folder: (folder / "progress.json").write_text("{}"),
    ],
)
def test_a_folder_of_somebody_else_is_left_alone(texts, tmp_path, change):
    partial = tmp_path / "out.partial"
    partial.mkdir()
    (partial / "thesis.txt").write_text("mine")
    change(partial)
    with pytest.raises(InputError) as caught:
        run(texts, tmp_path / "out", "--context-length", 16)
    assert "out.partial" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert (partial / "thesis.txt").read_text() == "mine"
    assert (texts / "a.txt").is_file()
    assert not (tmp_path / "out").exists()


def test_a_link_in_a_folder_of_somebody_else_is_not_followed(texts, tmp_path):
    partial = tmp_path / "out.partial"
    partial.mkdir()
    (partial / "sub").symlink_to(texts)
    (partial / "train-00000.arrow").write_bytes(b"mine")
    write_progress(partial, files=["sub/a.txt"])
    with pytest.raises(InputError, match=r"out\.partial holds other files"):
        run(texts / "b.txt", tmp_path / "out", "--context-length", 16)
    assert (texts / "a.txt").is_file()
    assert (partial / "train-00000.arrow").read_bytes() == b"mine"


def test_a_link_in_the_way_is_not_followed(texts, tmp_path):
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "thesis.txt").write_text("mine")
    (tmp_path / "out.partial").symlink_to("theirs")
    with pytest.raises(InputError, match=r"out\.partial holds other files"):
        run(texts, tmp_path / "out", "--context-length", 16)
    assert files_below(tmp_path / "theirs") == {"thesis.txt": b"mine"}


def test_what_a_killed_run_left_is_replaced(texts, tmp_path, monkeypatch):
    def killed(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(preparation, "_write", killed)
    with pytest.raises(KeyboardInterrupt):
        run(texts, tmp_path / "out", "--context-length", 16, "--tokenizer", "bpe:300")
    left = tmp_path / "out.partial"
    (left / "train-00000.arrow").write_bytes(b"half")
    assert json.loads((left / "progress.json").read_text())["position"] is None
    monkeypatch.undo()
    run(texts, tmp_path / "out", "--context-length", 16, "--val-share", 0.1)
    assert {path.name for path in tmp_path.iterdir()} == {"texts", "out"}
    assert read_text_meta(tmp_path / "out")["vocab_size"] == 257


def test_what_a_run_left_that_was_killed_at_its_end_is_used(texts, tmp_path, monkeypatch):
    def killed(*arguments):
        raise KeyboardInterrupt

    how = (texts, tmp_path / "out", "--context-length", 16, "--val-share", 0.1)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", killed)
        with pytest.raises(KeyboardInterrupt):
            run(*how)
    left = files_below(tmp_path / "out.partial")
    with pytest.raises(InputError, match="context_length: 16, now 8"):
        run(*how, "--context-length", 8)
    monkeypatch.setattr(preparation, "_write", killed)
    run(*how)
    del left["progress.json"]
    assert contents(tmp_path / "out") == left


def test_two_do_not_write_the_same(texts, tmp_path, monkeypatch, in_another_process):
    how = (texts, tmp_path / "out", "--context-length", 16, "--val-share", 0.1)
    first, others = os.getpid(), []

    def sizes(folder):  # a process that reads its own lock file loses the lock
        return {path.name: path.stat().st_size for path in folder.iterdir()}

    def meanwhile(real):
        def look(*arguments):
            if os.getpid() == first:
                before = sizes(tmp_path / "out.partial")
                others.append(in_another_process(lambda: run(*how)).err)
                assert sizes(tmp_path / "out.partial") == before
            return real(*arguments)

        return look

    monkeypatch.setattr(preparation, "load_tokenizer", meanwhile(preparation.load_tokenizer))
    monkeypatch.setattr(preparation, "_batch", meanwhile(preparation._batch))
    run(*how)
    assert len(others) > 2
    for other in others:
        assert other.startswith(f"InputError: {tmp_path / 'out'}.partial is in use by process")
        assert f" {first} on " in other
        assert other.endswith("or choose another place")
        assert "\n" not in other
    monkeypatch.undo()
    run(*how[:1], tmp_path / "alone", *how[2:])
    assert contents(tmp_path / "out") == contents(tmp_path / "alone")


@pytest.mark.parametrize(
    "place", ["byte_tokenizer", "new_folder", "write_whole", "_write", "_check_rows"]
)
def test_the_lock_of_a_killed_run_is_free(texts, tmp_path, monkeypatch, in_another_process, place):
    module = language if place == "byte_tokenizer" else preparation
    real = getattr(module, place)

    def killed(*arguments):
        real(*arguments)
        os.kill(os.getpid(), signal.SIGKILL)

    how = (texts, tmp_path / "out", "--context-length", 16, "--val-share", 0.1)
    with monkeypatch.context() as patch:
        patch.setattr(module, place, killed)
        done = in_another_process(lambda: run(*how))
    assert done.status == -signal.SIGKILL
    assert (tmp_path / "out.partial" / ".lock").is_file()
    run(*how)
    assert {path.name for path in tmp_path.iterdir()} == {"texts", "out"}
    assert ".lock" not in contents(tmp_path / "out")


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have UTF-8 names alone")
def test_a_name_that_is_not_utf8_is_read(texts, tmp_path):
    name = tmp_path / "caf\udce9.txt"
    name.write_bytes((texts / "a.txt").read_bytes())
    for _ in range(2):
        run(name, tmp_path / "out", "--context-length", 16, "--val-share", 0.1)
    assert read_text_meta(tmp_path / "out").get("sources") == [rf"{tmp_path}/caf\udce9.txt"]


def test_held_out_files_are_given(texts, tmp_path):
    how = (
        "--documents",
        "line",
        "--context-length",
        8,
        "--val",
        texts / "b.txt",
        texts / "c.jsonl",
    )
    run(texts / "a.txt", tmp_path / "out", *how)
    meta = read_text_meta(tmp_path / "out")
    assert meta["splits"]["train"]["documents"] == 1200
    assert meta["splits"]["val"]["documents"] == 1600
    assert tokens(tmp_path / "out", "train")[:13].tolist() == [*"a says 0 é".encode(), 256, 97]


def test_training_ends_at_its_limit(texts, tmp_path):
    how = ("--context-length", 8, "--val-share", 0.1, "--limit-tokens", 1000)
    run(texts / "c.jsonl", tmp_path / "out", *how)
    train = read_text_meta(tmp_path / "out")["splits"]["train"]
    assert 1000 <= train["tokens"] < 1000 + len("row 400 " * 4)
    assert train["tokens"] == train["bytes"] + train["documents"]


def test_rows_of_digits_begin_with_a_line(tmp_path):
    run(
        "--reversal",
        50,
        tmp_path / "out",
        "--digits",
        3,
        "--context-length",
        16,
        "--val-share",
        0.2,
    )
    for split, lines in (("train", 40), ("val", 10)):
        rows = open_rows(tmp_path / "out", split)[:]["input_ids"]
        assert rows.shape == (lines // 2, 17)
        for line in rows[:, :16].reshape(-1, 8):
            text = bytes(line.tolist()).decode()
            assert text == f"{text[:3]}>{text[2::-1]}\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("nowhere.txt", "out"), "there is no file or folder nowhere.txt"),
        (("empty", "out"), "empty has no text file; .*parquet"),
        (("empty.txt", "out"), "empty.txt is empty"),
        (("blank.txt", "out", "--documents", "line"), "the train part has 0 tokens, too few"),
        (("damaged.parquet", "out"), "damaged.parquet is not a readable parquet file"),
        (("damaged.jsonl", "out"), "damaged.jsonl cannot be read: line 2 is not JSON"),
        (("texts/c.jsonl", "out", "--column", "body"), "no column 'body'; .*--column: text, id"),
        (("texts/c.jsonl", "out", "--column", "id"), "the column 'id' holds int, not text"),
        (("texts", "out", "--context-length", "9999"), "val part has .* tokens, too few .*10000"),
        (("texts", "out", "--tokenizer", "no/such/path"), "there is no tokenizer in no/such/path"),
        (("texts", "out", "--tokenizer", "bpe:9"), "bpe:9 is too small"),
        (("texts", "out", "--tokenizer", "bpe:0"), "bpe:0 is too small"),
        (("texts", "out", "--tokenizer", "bpe:999999999"), "bpe:999999999 is too large"),
        (("texts", "."), r"\. exists .* choose another place"),
        (("texts", "out", "--tokenizer", "evil"), "custom code .* is never run"),
        (("texts", "empty"), "empty exists .* choose another place"),
        (
            ("texts", "out", "--val", "texts/a.txt"),
            "a.txt is both a source and in --val: remove it from one",
        ),
    ],
)
def test_what_cannot_be_is_said_in_one_line(texts, tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    Path("empty").mkdir()
    Path("empty.txt").touch()
    Path("blank.txt").write_text("\n\n")
    Path("damaged.parquet").write_text("no")
    Path("evil").mkdir()
    Path("evil/evil.py").write_text("open('code_ran', 'w').close()")
    code = {"auto_map": {"AutoTokenizer": ["evil.Evil", None]}, "tokenizer_class": "Evil"}
    Path("evil/tokenizer_config.json").write_text(json.dumps(code))
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n" * 9))
    Path("damaged.jsonl").write_text('{"text": "a"}\n{"text": \n')
    with pytest.raises(InputError, match=message) as caught:
        run(*arguments)
    assert "\n" not in str(caught.value)
    assert not Path("out").exists()
    assert not Path("code_ran").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("out",), "give SOURCE... OUT"),
        (("a", "out", "--hub", "b"), "give SOURCE... OUT"),
        (("a", "--val", "b", "out"), "--val takes all paths after it"),
        (("a", "out", "--val-share", "1"), "'1' is not a number of at least 0 and below 1"),
        (("a", "out", "--val-share", "0.1", "--val", "b"), "give one of them"),
        (("a", "out", "--tokenizer", "bpe:many"), "N of bpe:N must be a whole number"),
        (("a", "out", "--tokenizer", f"bpe:{'9' * 5000}"), "N of bpe:N must be a whole number"),
        (("a", "out", "--context-length", str(2**31)), "at most 2147483646"),
        (("a", "out", "--limit-tokens", "9" * 400), "not a whole number"),
        (("out", "--reversal", "9" * 12), "at most 10000000"),
        (("out", "--reversal", "9", "--context-length", "33"), "give a multiple of 34"),
        (("out", "--reversal", "9", "--tokenizer", "gpt2"), "leave out --tokenizer"),
        (
            ("out", "--reversal", "9", "--documents", "file"),
            "--documents is for SOURCE or --val",
        ),
        (
            ("out", "--reversal", "9", "--column", "text"),
            "--column is for SOURCE or --val",
        ),
        (
            ("out", "--reversal", "9", "--split", "train"),
            "not for --reversal: leave it out",
        ),
        (("out", "--hub", "b", "--documents", "line"), "not for --hub: leave it out"),
        (("out", "--hub", "b", "--seed", "0"), "--seed is for --reversal, not for --hub"),
        (("a", "out", "--seed", "0"), "--seed is for --reversal, not for SOURCE: leave it out"),
        (("a", "out", "--digits", "16"), "--digits is for --reversal"),
        (("a", "out", "--split", "train"), "--split is for --hub, not for SOURCE: leave it out"),
        (("a", "out", "--hub-config", "en"), "--hub-config is for --hub"),
        (("a", "out", "--hub-revision", "main"), "--hub-revision is for --hub"),
    ],
)
def test_what_does_not_go_together(capsys, arguments, message):
    with pytest.raises(SystemExit, match="2"):
        run(*arguments)
    assert message in capsys.readouterr().err


def test_without_datasets_it_says_what_to_install(monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(SystemExit, match="1"):
        run_tool(lambda: run(tmp_path, tmp_path / "out"))
    line = "error: datasets is not installed: in the clone, run pip install '.[language]'\n"
    assert capsys.readouterr().err == line


@pytest.mark.parametrize(
    ("name", "entries"), [("gpt2", 50257), ("gpt_neox_20b/tokenizer.json", 50277)]
)
def test_published_tokenizers(shared_data, tmp_path, name, entries):
    source = tmp_path / "input.txt"
    shutil.copy(shared_data("text/gutenberg_en/blake-poems.txt"), source)
    how = ("--context-length", 64, "--val-share", 0.1)
    run(source, tmp_path / "out", *how, "--tokenizer", shared_data(f"tokenizers/{name}"))
    reader = load_tokenizer(tmp_path / "out")
    text = source.read_text()
    train = tokens(tmp_path / "out", "train")
    assert text.startswith(reader.decode(train))
    np.testing.assert_array_equal(train, reader(text)["input_ids"][: len(train)])
    assert read_text_meta(tmp_path / "out")["vocab_size"] == entries
