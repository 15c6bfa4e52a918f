"""Unpacking data sets into class folders: the same tree every time, or one clear line."""

import io
import json
import os
import signal
import subprocess
import sys

import numpy as np
import pytest
from PIL import Image
from timm.data.readers.reader_image_folder import find_images_and_targets

from tokenformer_vit.cli import prepare_data
from tokenformer_vit.errors import InputError

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")


def encoded(value, kind="PNG"):
    buffer = io.BytesIO()
    Image.new("RGB", (4, 4), (value % 256, value // 256, 7)).save(buffer, format=kind)
    return buffer.getvalue()


def write_shard(
    path,
    labels,
    names=("ant", "bee", "cat"),
    images=None,
    image_column="image",
    rows_per_group=4,
):
    images = images or [encoded(row, "PNG" if row % 2 else "JPEG") for row in range(len(labels))]
    table = pa.table(
        {
            image_column: pa.array(
                [{"bytes": data, "path": "x.JPEG"} for data in images],
                pa.struct([("bytes", pa.binary()), ("path", pa.string())]),
            ),
            "label": pa.array(labels, pa.int64()),
        }
    )
    if names:
        features = {"label": {"names": list(names), "_type": "ClassLabel"}}
        table = table.replace_schema_metadata(
            {"huggingface": json.dumps({"info": {"features": features}})}
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, path, row_group_size=rows_per_group)
    return images


@pytest.fixture
def source(tmp_path):
    """Two train shards of several row groups, a validation and an unlabelled test split."""
    folder = tmp_path / "source" / "data"
    write_shard(folder / "train-00000-of-00002.parquet", [0, 1, 2, 0, 1, 2, 0])
    write_shard(folder / "train-00001-of-00002.parquet", [2, 2, 1, 0, 0])
    write_shard(folder / "validation-00000-of-00001.parquet", [2, 1, 0])
    write_shard(folder / "test-00000-of-00001.parquet", [-1, -1])
    return tmp_path / "source"


def run(*arguments):
    prepare_data.main([str(argument) for argument in arguments])


def failure(capsys, *arguments):
    """Run, and return the one line that it must end with."""
    with pytest.raises(InputError) as error:
        run(*arguments)
    message = str(error.value)
    assert "\n" not in message
    return message


def tree(folder):
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def test_bytes_classes_and_suffixes_are_kept(source, tmp_path, capsys):
    run(source, tmp_path / "out")
    files = tree(tmp_path / "out")
    images = [encoded(row, "PNG" if row % 2 else "JPEG") for row in range(7)]
    labels = ["ant", "bee", "cat", "ant", "bee", "cat", "ant"]
    for row, (data, label) in enumerate(zip(images, labels, strict=True)):
        suffix = "png" if row % 2 else "jpg"
        assert files[f"train/{label}/train-00000-of-00002_{row:07d}.{suffix}"] == data
    assert len([name for name in files if name.startswith("train/")]) == 12
    assert sorted(name for name in files if name.startswith("val/")) == [
        "val/ant/validation-00000-of-00001_0000002.jpg",
        "val/bee/validation-00000-of-00001_0000001.png",
        "val/cat/validation-00000-of-00001_0000000.jpg",
    ]
    out = capsys.readouterr().out
    assert f"train: 12 images of 3 classes in {tmp_path / 'out' / 'train'}" in out
    assert "val: 3 images of 3 classes" in out
    assert f"tokenformer-vit train CONFIG --data-root {tmp_path / 'out'}" in out


def test_same_tree_after_an_interruption_anywhere(source, tmp_path, monkeypatch):
    run(source, tmp_path / "whole")
    whole = tree(tmp_path / "whole")
    replace = os.replace
    for stop in range(len(whole)):
        target = tmp_path / f"killed{stop}"
        left = [stop]

        def die(partial, path, left=left):
            if left[0] == 0:
                raise KeyboardInterrupt
            left[0] -= 1
            replace(partial, path)

        monkeypatch.setattr(os, "replace", die)
        with pytest.raises(KeyboardInterrupt):
            run(source, target)
        monkeypatch.setattr(os, "replace", replace)
        assert len(tree(target)) == stop
        run(source, target)
        assert tree(target) == whole


def test_finished_files_are_not_written_again(source, tmp_path, monkeypatch):
    run(source, tmp_path / "out")
    monkeypatch.setattr(os, "replace", lambda *_: pytest.fail("wrote a file that was there"))
    run(source, tmp_path / "out")


@pytest.mark.slow
def test_resumes_after_sigkill(source, tmp_path):
    # A true SIGKILL, which no handler sees, in the moment before the sixth file gets its name.
    script = f"""
import os, runpy, signal, sys
replace, done = os.replace, []
def die(partial, path):
    done.append(path)
    if len(done) == 6:
        os.kill(os.getpid(), signal.SIGKILL)
    replace(partial, path)
os.replace = die
sys.argv = ["tokenformer-vit", "prepare-data", {str(source)!r}, {str(tmp_path / "killed")!r}]
runpy.run_module("tokenformer_vit", run_name="__main__")
"""
    killed = subprocess.run([sys.executable, "-c", script], capture_output=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    left = tree_names(tmp_path / "killed")
    assert len(left) == 6
    assert len([name for name in left if name.endswith(".partial")]) == 1
    run(source, tmp_path / "killed")
    run(source, tmp_path / "whole")
    assert tree(tmp_path / "killed") == tree(tmp_path / "whole")


def tree_names(folder):
    return [str(path) for path in folder.rglob("*") if path.is_file()]


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["ant", "bee", "cat"], ["ant", "bee", "cat"]),
        (["cat", "ant", "bee"], ["0_cat", "1_ant", "2_bee"]),
        # Sorted as text, but timm sorts numbers as numbers and without regard to case.
        (["a10", "a9"], ["0_a10", "1_a9"]),
        (["Zebra", "ant"], ["0_Zebra", "1_ant"]),
        (["a/b", "a_b"], ["0_a_b", "1_a_b"]),
        (["Ant", "ant"], ["0_Ant", "1_ant"]),
        (["..", "x"], ["0_", "1_x"]),
        ([f"c{i}" for i in range(12)], [f"{i:02d}_c{i}" for i in range(12)]),
    ],
)
def test_readers_keep_the_order_of_classes(names, expected, tmp_path):
    folders = prepare_data.folder_names(names)
    assert folders == expected
    for folder in folders:
        (tmp_path / folder).mkdir()
        Image.new("L", (2, 2)).save(tmp_path / folder / "x.png")
    _, timm_index = find_images_and_targets(str(tmp_path))
    assert timm_index == {folder: index for index, folder in enumerate(folders)}
    assert sorted(folders) == folders  # torchvision, mmpretrain


def test_without_names_the_padded_label_is_the_folder(tmp_path):
    write_shard(tmp_path / "in" / "train-0.parquet", [0, 10, 3], names=None)
    run(tmp_path / "in", tmp_path / "out")
    assert len(os.listdir(tmp_path / "out/train")) == 11
    assert [path.name for path in (tmp_path / "out/train/03").iterdir()] == ["train-0_0000002.jpg"]


def test_limits_take_the_first_rows_and_keep_every_class(source, tmp_path, capsys):
    run(source, tmp_path / "out", "--limit", 8, "--limit-val", 1)
    files = tree(tmp_path / "out")
    assert len(files) == 9
    assert "train/cat/train-00001-of-00002_0000000.jpg" in files
    assert sorted(os.listdir(tmp_path / "out/val")) == ["ant", "bee", "cat"]
    assert "2 of 3 classes have no image in val" in capsys.readouterr().err
    # A larger limit continues; a smaller one would leave images that it does not count.
    run(source, tmp_path / "out", "--limit", 9)
    assert len(tree(tmp_path / "out")) == 12
    message = failure(capsys, source, tmp_path / "out", "--limit", 2)
    assert "7 images that this command would not write" in message


def test_splits_can_be_named(source, tmp_path, capsys):
    run(source, tmp_path / "out", "--splits", "train=validation", "val=train")
    assert len(tree(tmp_path / "out" / "train")) == 3
    assert len(tree(tmp_path / "out" / "val")) == 12
    message = failure(capsys, source, tmp_path / "b", "--splits", "val=holdout")
    assert "'holdout'" in message
    assert "test, train, validation" in message


def test_hub_conversion_layout_and_img_column(tmp_path):
    write_shard(tmp_path / "in/plain/train/0000.parquet", [0, 1], image_column="img")
    write_shard(tmp_path / "in/plain/test/0000.parquet", [1], image_column="img")
    run(tmp_path / "in", tmp_path / "out")
    assert sorted(tree(tmp_path / "out")) == [
        "train/ant/train-0000_0000000.jpg",
        "train/bee/train-0000_0000001.png",
        "val/bee/test-0000_0000000.jpg",
    ]


def test_shards_of_two_data_sets_are_refused(tmp_path, capsys):
    write_shard(tmp_path / "in/a/train-0.parquet", [0])
    write_shard(tmp_path / "in/b/train-0.parquet", [0])
    message = failure(capsys, tmp_path / "in", tmp_path / "out")
    assert str(tmp_path / "in/a") in message
    assert str(tmp_path / "in/b") in message


def test_target_of_another_data_set_is_refused(source, tmp_path, capsys):
    (tmp_path / "out/train/zebra").mkdir(parents=True)
    message = failure(capsys, source, tmp_path / "out")
    assert "'zebra'" in message
    assert tree(tmp_path / "out") == {}


def test_missing_source(tmp_path, capsys):
    assert str(tmp_path / "nowhere") in failure(capsys, tmp_path / "nowhere", tmp_path / "out")


def test_no_parquet(tmp_path, capsys):
    (tmp_path / "in").mkdir()
    message = failure(capsys, tmp_path / "in", tmp_path / "out")
    assert "no *.parquet" in message
    assert str(tmp_path / "in") in message


def test_no_known_split(tmp_path, capsys):
    write_shard(tmp_path / "in" / "everything.parquet", [0])
    message = failure(capsys, tmp_path / "in", tmp_path / "out")
    assert "everything" in message
    assert "--splits" in message


def test_no_image_column(tmp_path, capsys):
    write_shard(tmp_path / "in" / "train-0.parquet", [0], image_column="picture")
    message = failure(capsys, tmp_path / "in", tmp_path / "out")
    assert "train-0.parquet" in message
    assert "picture, label" in message
    run(tmp_path / "in", tmp_path / "out", "--image-column", "picture")
    assert len(tree(tmp_path / "out")) == 1


def test_column_that_is_no_image(tmp_path, capsys):
    write_shard(tmp_path / "in" / "train-0.parquet", [0])
    message = failure(capsys, tmp_path / "in", tmp_path / "out", "--image-column", "label")
    assert "'label' is int64" in message


def test_no_label_column(source, tmp_path, capsys):
    message = failure(capsys, source, tmp_path / "out", "--label-column", "fine_label")
    assert "'fine_label'" in message
    assert "image, label" in message


@pytest.mark.parametrize(
    ("label", "said"), [(3, "label is 3, but must be 0 to 2"), (-1, "is -1"), (None, "missing")]
)
def test_bad_label_is_named_before_anything_is_written(label, said, tmp_path, capsys):
    write_shard(tmp_path / "in" / "train-0.parquet", [0, 1])
    write_shard(tmp_path / "in" / "train-1.parquet", [0, 1, 2, 0, label, 1])
    message = failure(capsys, tmp_path / "in", tmp_path / "out")
    assert f"{tmp_path / 'in' / 'train-1.parquet'}, row 4: " in message
    assert said in message
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("data", [b"not an image", b"", None])
def test_bad_image_is_named(data, tmp_path, capsys):
    images = [encoded(0), encoded(1), encoded(2), encoded(3), encoded(4), data, encoded(6)]
    write_shard(tmp_path / "in" / "train-0.parquet", [0] * 7, images=images)
    message = failure(capsys, tmp_path / "in", tmp_path / "out")
    assert f"{tmp_path / 'in' / 'train-0.parquet'}, row 5: " in message
    assert len(tree(tmp_path / "out")) == 5


def test_names_of_classes_make_plain_folders(tmp_path, capsys):
    names = ["a\x1b[31m", "b\u202e", "c\ud800", "d$"]
    write_shard(tmp_path / "in" / "train-0.parquet", [0, 1, 2, 3], names=names)
    run(tmp_path / "in", tmp_path / "out")
    assert sorted(os.listdir(tmp_path / "out/train")) == ["a_[31m", "b_", "c_", "d$"]
    assert "\x1b" not in capsys.readouterr().out


@pytest.mark.parametrize("linked", [False, True])
def test_partial_files_of_others_are_kept(linked, source, tmp_path):
    target = tmp_path / "out"
    run(source, target)
    folder = target / "train" / "ant"
    if linked:
        folder.rename(tmp_path / "elsewhere")
        folder.symlink_to(tmp_path / "elsewhere")
    (folder / "download.partial").write_text("mine")
    (folder / ".x.jpg.partial").write_text("mine")
    run(source, target)
    assert (folder / "download.partial").read_text() == "mine"
    assert (folder / ".x.jpg.partial").read_text() == "mine"


def test_damaged_parquet_is_named(tmp_path, capsys):
    path = tmp_path / "in" / "train-0.parquet"
    write_shard(path, [0, 1, 2])
    path.write_bytes(path.read_bytes()[:-20])
    assert str(path) in failure(capsys, tmp_path / "in", tmp_path / "out")


def test_unwritable_target_is_one_line(source, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert str(tmp_path / "file") in failure(capsys, source, tmp_path / "file" / "out")


def test_formats_that_readers_skip_are_warned_of(tmp_path, capsys):
    images = [encoded(0, "WEBP"), encoded(1, "PNG")]
    write_shard(tmp_path / "in" / "train-0.parquet", [0, 1], images=images)
    run(tmp_path / "in", tmp_path / "out")
    assert tree(tmp_path / "out")["train/ant/train-0_0000000.webp"] == images[0]
    assert "1 files are .webp" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        ["only_one"],
        ["--digits", "source", "target"],
        ["--digits", "--check", "target"],
        ["a", "b", "--limit", "0"],
        ["a", "b", "--splits", "trian=train"],
    ],
)
def test_usage_errors(arguments):
    with pytest.raises(InputError):
        run(*arguments)


def test_digits(tmp_path):
    load_digits = pytest.importorskip("sklearn.datasets").load_digits
    run("--digits", tmp_path / "out")
    run("--digits", tmp_path / "again")
    files = tree(tmp_path / "out")
    assert files == tree(tmp_path / "again")
    digits = load_digits()
    assert len(files) == len(digits.target) == 1797
    per_class = np.bincount(digits.target)
    for label in range(10):
        val = len(os.listdir(tmp_path / "out/val" / str(label)))
        assert abs(val - per_class[label] / 5) < 1
    seen = set()
    for name, data in files.items():
        _, label, file = name.split("/")
        index = int(file.removeprefix("digit_").removesuffix(".png"))
        seen.add(index)
        pixels = np.asarray(Image.open(io.BytesIO(data)))
        assert int(label) == digits.target[index]
        np.testing.assert_allclose(pixels, digits.images[index] * 255 / 16, atol=0.5)
    assert seen == set(range(1797))


def test_check_lists_what_cannot_be_decoded(source, tmp_path, capsys):
    target = tmp_path / "out"
    run(source, target)
    run("--check", target)
    assert f"all 15 images in {target} can be read" in capsys.readouterr().out
    noise = np.random.default_rng(0).integers(0, 255, (64, 64, 3), dtype=np.uint8)
    cut = target / "train/ant/cut.JPEG"
    Image.fromarray(noise).save(cut)
    cut.write_bytes(cut.read_bytes()[:1500])  # the header is whole, the picture is not
    empty = target / "val/ant/empty.png"
    empty.write_bytes(b"")
    with pytest.raises(SystemExit) as exit_:
        run("--check", target)
    assert exit_.value.code == 1
    out = capsys.readouterr().out
    assert f"unreadable: {cut}: " in out
    assert f"unreadable: {empty}: " in out
    assert len([line for line in out.splitlines() if line.startswith("unreadable: ")]) == 2
    assert "2 of 17 images are unreadable" in out


def test_a_killed_process_of_a_check_is_one_line(source, tmp_path, monkeypatch, capsys):
    run(source, tmp_path / "out")
    monkeypatch.setattr("tokenformer_vit.vision.folders.read_image", lambda _: os._exit(9))
    message = failure(capsys, "--check", tmp_path / "out", "--workers", 1)
    assert "; give fewer --workers" in message


def test_check_of_nothing(tmp_path, capsys):
    assert "no image" in failure(capsys, "--check", tmp_path)
    assert str(tmp_path / "no") in failure(capsys, "--check", tmp_path / "no")


@pytest.mark.parametrize(
    ("name", "folder"), [("cifar10", "truck"), ("imagenette_128", "3_chain_saw")]
)
def test_real_data(name, folder, shared_data, tmp_path):
    run(shared_data(name), tmp_path, "--limit", 500, "--limit-val", 200)
    assert len(tree_names(tmp_path / "train")) == 500
    assert len(tree_names(tmp_path / "val")) == 200
    assert len(os.listdir(tmp_path / "train")) == 10
    assert os.listdir(tmp_path / "train" / folder)
    run("--check", tmp_path)
