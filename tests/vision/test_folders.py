"""All readers find the same images in a folder, and say what they leave out."""

import shutil
from collections import Counter

import pytest
from mmengine.config import Config
from mmpretrain.datasets import CustomDataset
from PIL import Image

from tokenformer_vit.errors import InputError
from tokenformer_vit.training.config import check_folders
from tokenformer_vit.vision.compression import labelled_images, sample_images
from tokenformer_vit.vision.folders import check_images
from tokenformer_vit.vision.images import (
    IMAGE_SUFFIXES,
    class_folders,
    find_images,
    read_image,
    scan_images,
)

NAMES = [f"{index:02}{suffix}" for index, suffix in enumerate(IMAGE_SUFFIXES)]


@pytest.fixture
def root(tmp_path):
    """Images of every suffix in two classes, one class a link, and files that are not images."""
    Image.new("1", (4, 4)).save(tmp_path / "x.png")
    for folder in (tmp_path / "data/train/ant/deep", tmp_path / "elsewhere"):
        folder.mkdir(parents=True)
        for name in NAMES:
            shutil.copy(tmp_path / "x.png", folder / name)
    (tmp_path / "data/train/bee").symlink_to(tmp_path / "elsewhere")
    ant = tmp_path / "data/train/ant"
    shutil.copy(tmp_path / "x.png", ant / "upper.PNG")
    for name in ("a.txt", "b.TXT", "nothing", ".hidden", "._ghost.png"):
        (ant / name).touch()
    (ant / "lost").symlink_to(tmp_path / "nowhere")
    return tmp_path / "data"


def config(root):
    dataset = {"type": "CustomDataset", "data_root": str(root), "data_prefix": "train"}
    return Config({"train_dataloader": {"dataset": dataset}})


LEFT_OUT = "left out: 2 .txt, 1 broken link, 1 without a suffix in {}\n"


def test_all_readers_find_the_same_images(root, capsys):
    train = root / "train"
    expected = [str(train / "ant/deep" / name) for name in NAMES]
    expected += [str(train / "ant/upper.PNG"), *(str(train / "bee" / name) for name in NAMES)]

    assert [str(path) for path in find_images([train])] == expected
    assert capsys.readouterr().err == LEFT_OUT.format(train)

    samples = labelled_images(train, num_classes=2)
    assert [str(path) for path, _ in samples] == expected
    assert [label for _, label in samples] == [0] * (len(NAMES) + 1) + [1] * len(NAMES)
    assert capsys.readouterr().err == LEFT_OUT.format(train)
    assert sorted(map(str, sample_images(train, 1000, 0, root / "val"))) == sorted(expected)
    capsys.readouterr()

    check_folders(config(root), ("train_dataloader",))
    assert capsys.readouterr().err == LEFT_OUT.format(train)
    trained = CustomDataset(str(root), "train", extensions=IMAGE_SUFFIXES).load_data_list()
    assert sorted(each["img_path"] for each in trained) == sorted(expected)
    assert {each["img_path"]: each["gt_label"] for each in trained} == {
        str(path): label for path, label in samples
    }

    assert check_images(train, workers=1) == []
    captured = capsys.readouterr()
    assert f"all {len(expected)} images" in captured.out
    assert captured.err.startswith(LEFT_OUT.format(train)[:-1])


def test_one_folder_of_two_loaders_is_said_once(root, capsys):
    cfg = config(root)
    cfg.val_dataloader = cfg.train_dataloader
    check_folders(cfg, ("train_dataloader", "val_dataloader"))
    assert capsys.readouterr().err.count("left out") == 1


def test_other_processes_do_not_say_it_again(root, capsys, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    check_folders(config(root), ("train_dataloader",))
    assert capsys.readouterr().err == ""


def test_images_beside_the_class_folders_are_counted(root, capsys):
    shutil.copy(root / "train/ant/upper.PNG", root / "train/loose.png")
    (root / "train/README").touch()
    check_folders(config(root), ("train_dataloader",))
    assert "1 in no class folder" in capsys.readouterr().err


@pytest.mark.parametrize("place", ["train", "train/ant"])
def test_copies_in_hidden_folders_are_no_images(place, root, capsys):
    before = find_images([root / "train"])
    hidden = root / place / ".ipynb_checkpoints"
    hidden.mkdir()
    shutil.copy(root / "train/ant/upper.PNG", hidden / "copy.png")
    assert find_images([root / "train"]) == before
    assert "1 hidden folder, " in capsys.readouterr().err
    assert len(labelled_images(root / "train", num_classes=2)) == len(before)
    with pytest.raises(InputError, match="train holds hidden folders, which mmpretrain reads"):
        check_folders(config(root), ("train_dataloader",))


def test_of_many_kinds_of_files_the_commonest_are_named(root, capsys):
    for index in range(20):
        (root / "train/bee" / f"shard.{index:04}").touch()
    find_images([root / "train"])
    line = capsys.readouterr().err
    assert line.count("\n") == 1
    assert line.startswith("left out: 2 .txt, ")
    assert f" and 15 more in {root / 'train'}" in line


def test_a_folder_that_contains_itself_ends(root):
    (root / "train/ant/again").symlink_to(root / "train")
    (root / "train/ant/once_more").symlink_to(root / "train")
    with pytest.raises(OSError, match="symbolic links") as raised:
        list(scan_images(root / "train", Counter()))
    assert raised.value.filename.startswith(str(root / "train/ant/again"))


def test_a_link_to_itself_is_a_broken_link(root, capsys):
    before = find_images([root / "train"])
    for place in ("train", "train/ant"):
        for name in ("loop", "loop.png"):
            (root / place / name).symlink_to(name)
    capsys.readouterr()
    found = find_images([root / "train"])
    assert set(found) - set(before) == {root / "train/loop.png", root / "train/ant/loop.png"}
    assert "3 broken link" in capsys.readouterr().err
    assert [path.name for path in class_folders(root / "train", Counter())] == ["ant", "bee"]
    with pytest.raises(InputError, match=r"ant/loop\.png: it is a broken link"):
        read_image(root / "train/ant/loop.png")


def test_a_folder_without_images_says_what_it_has(tmp_path):
    (tmp_path / "x.txt").touch()
    with pytest.raises(
        InputError, match=rf"no image in the folder {tmp_path}, but 1 \.txt \(\.jpg"
    ):
        find_images([tmp_path])
