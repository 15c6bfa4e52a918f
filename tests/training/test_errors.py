"""A user's mistake ends in one line with the mistake and the way out."""

import errno
import json
import shutil

import numpy as np
import pytest
from PIL import Image

from tokenformer_vit.command_line import run_tool
from tokenformer_vit.errors import InputError
from tokenformer_vit.training.data.images import LoadImage, PackLabels

ARC = {"type": "ArcFaceClsHead", "num_classes": 3, "in_channels": 24, "_delete_": True}
PACKED = [{"type": "LoadImage"}, {"type": "PackInputs"}]


def own_head(config, path, head, more=""):
    path.write_text(
        f"_base_ = {str(config)!r}\nmodel = dict(head={head!r}, train_cfg=None)\n"
        f"train_dataloader = dict(num_workers=0, dataset=dict(pipeline={PACKED!r}))\n"
        f"train_cfg = dict(max_epochs=1)\nparam_scheduler = []\n{more}\n"
    )
    return path


def test_a_model_for_several_labels_an_image_trains(train, config, data_root, tmp_path, command):
    files = sorted(data_root.glob("train/*/*.png"))
    labelled = [
        {"img_path": str(file), "gt_label": [0, 2] if index % 2 else [1]}
        for index, file in enumerate(files)
    ]
    listed = tmp_path / "labels.json"
    listed.write_text(json.dumps({"metainfo": {"classes": "abc"}, "data_list": labelled}))
    of_several = {"type": "MultiLabelDataset", "ann_file": str(listed), "_delete_": True}
    head = {**ARC, "type": "MultiLabelLinearClsHead"}
    own = own_head(
        config,
        tmp_path / "own.py",
        head,
        f"train_dataloader['dataset'] = dict({of_several!r}, pipeline={PACKED!r})\n"
        f"val_dataloader = dict(dataset=dict({of_several!r}, pipeline={PACKED!r}))\n"
        "test_dataloader = val_dataloader\n"
        "val_evaluator = dict(_delete_=True, type='AveragePrecision')\n"
        "test_evaluator = val_evaluator",
    )
    run = tmp_path / "run"
    words = [str(own), "--work-dir", str(run)]
    done = command("train", *words)
    assert done.status == 0, done.output
    assert "multi-label/mAP" in done.output
    done = command("test", str(own), str(run / "epoch_1.pth"), "--out", str(tmp_path / "tested"))
    assert done.status == 0, done.output
    measured = json.loads((tmp_path / "tested" / "metrics.json").read_text())["metrics"]
    assert measured.keys() == {"multi-label/mAP"}


@pytest.mark.parametrize("content", ["truncated", "text", "missing"])
@pytest.mark.parametrize("suffix", ["jpg", "png"])
def test_an_unreadable_image_is_named(tmp_path, content, suffix, seed):
    path = tmp_path / f"broken.{suffix}"
    if content == "truncated":
        rng = np.random.default_rng(seed)
        Image.fromarray(rng.integers(0, 255, (64, 64, 3), dtype=np.uint8)).save(path)
        path.write_bytes(path.read_bytes()[:-400])
    elif content == "text":
        path.write_text("not an image")
    with pytest.raises(InputError, match=rf"cannot read image .*broken\.{suffix}.*replace or del"):
        LoadImage()({"img_path": str(path)})


def test_an_image_of_another_size_is_named():
    pack = PackLabels()
    for side in (8, 8, 9):
        sample = {"img": np.zeros((side, 8, 3), np.uint8), "img_path": f"{side}.png", "gt_label": 1}
        if side == 8:
            assert pack(sample)["inputs"].shape == (3, 8, 8)
    with pytest.raises(InputError, match=r"9\.png has the shape \(9, 8, 3\).*a resize or a crop"):
        pack(sample)


@pytest.mark.parametrize("workers", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_a_corrupt_image_stops_training_with_its_name(train, data_root, tmp_path, workers):
    root = tmp_path / "images"
    shutil.copytree(data_root, root)
    (root / "train" / "dark" / "3.png").write_bytes(b"\x89PNG broken")
    line = train.fails(
        tmp_path / "run",
        "--data-root",
        str(root),
        "--cfg-options",
        f"train_dataloader.num_workers={workers}",
    )
    assert "cannot read image" in line
    assert "dark/3.png" in line


@pytest.mark.parametrize(
    ("error", "status", "line"),
    [
        (InputError("say this"), 1, "error: say this"),
        (
            InputError("Caught in worker\nTraceback ...\ntokenformer_vit.errors.InputError: this"),
            1,
            "error: this",
        ),
        (
            OSError(errno.ENOSPC, "No space left on device", "curves.png"),
            1,
            "error: curves.png: No space left on device",
        ),
        (KeyboardInterrupt(), 130, "interrupted; finished results are kept"),
    ],
)
def test_tools_end_in_one_line(capsys, error, status, line):
    def main():
        raise error

    with pytest.raises(SystemExit) as raised:
        run_tool(main)
    assert raised.value.code == status
    assert capsys.readouterr().err == f"{line}\n"
