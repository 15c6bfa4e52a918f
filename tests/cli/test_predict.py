"""Predictions agree with the model run by hand, and are printed as they are made."""

import csv
import json

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from timm.data import ImageNetInfo, create_transform, resolve_model_data_config
from timm.models import save_for_hf

from tokenformer_vit.cli import predict
from tokenformer_vit.errors import InputError
from tokenformer_vit.models.checkpoints import save_model

KWARGS = {"depth": 2, "img_size": 32, "patch_size": 8, "embed_dim": 48, "num_heads": 3}
LABELS = ["cat", "dog", "eel"]
NAMES = ["a.jpg", "b.png", "c.JPEG", "e.png", "more/d.png"]


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    model = timm.create_model("tokenformer_tiny", num_classes=3, **KWARGS).eval()
    torch.nn.init.normal_(model.head.weight)  # timm's is nearly 0: every image would look alike
    return model


@pytest.fixture(scope="module")
def exported(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("exported")
    save_for_hf(model, folder, model_config={"label_names": LABELS}, safe_serialization=True)
    return folder


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """Five images, one of them grey, in a folder and one below it."""
    folder = tmp_path_factory.mktemp("photos")
    (folder / "more").mkdir()
    random = np.random.default_rng(0)
    for name in NAMES:
        shape = (40, 40) if name == "e.png" else (40, 50, 3)
        Image.fromarray(random.integers(0, 255, shape, dtype=np.uint8)).save(folder / name)
    return folder


def run(capsys, *words):
    predict.main([str(word) for word in words])
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def by_hand(model, path):
    transform = create_transform(**resolve_model_data_config(model, {"input_size": (3, 32, 32)}))
    image = transform(Image.open(path).convert("RGB"))
    with torch.no_grad():
        return model(image[None]).softmax(-1)[0]


def test_answers_are_those_of_the_model(model, exported, photos, tmp_path, capsys):
    # Three batches, the last of one image; the model and its classes come from config.json.
    words = ["--checkpoint", exported, "--batch-size", 2, "--out", tmp_path / "new" / "table.csv"]
    answers = run(capsys, photos, "--json", *words)
    assert [answer["file"] for answer in answers] == [str(photos / name) for name in NAMES]
    for answer in answers:
        expected = by_hand(model, answer["file"])
        order = expected.argsort(descending=True).tolist()
        assert [guess["index"] for guess in answer["top"]] == order  # 5 asked for, 3 there are
        assert [guess["label"] for guess in answer["top"]] == [LABELS[i] for i in order]
        values = torch.tensor([guess["probability"] for guess in answer["top"]])
        torch.testing.assert_close(values, expected[order])
    assert len({json.dumps(answer["top"]) for answer in answers}) == 5
    rows = iter(csv.DictReader((tmp_path / "new" / "table.csv").open()))
    for answer in answers:
        for rank, guess in enumerate(answer["top"], 1):
            cells = [answer["file"], rank, guess["label"], guess["index"], guess["probability"]]
            assert list(next(rows).values()) == [str(cell) for cell in cells]
    words = [photos / "b.png", "--json", "--model", f"local-dir:{exported}", "--topk", 1]
    assert run(capsys, *words)[0]["top"] == answers[1]["top"][:1]


def test_what_was_printed_stays_after_an_interruption(
    exported, photos, tmp_path, monkeypatch, capsys
):
    def interrupted(*_):
        yield photos / "a.jpg", [{"label": "cat", "index": 0, "probability": 1.0}]
        raise KeyboardInterrupt

    monkeypatch.setattr(predict, "predict", interrupted)
    table = tmp_path / "new" / "table.csv"
    with pytest.raises(KeyboardInterrupt):
        predict.main([str(photos), "--checkpoint", str(exported), "--out", str(table)])
    assert capsys.readouterr().out == f"{photos / 'a.jpg'}\tcat 100.00%\n"
    assert table.read_text().splitlines()[1:] == [f"{photos / 'a.jpg'},1,cat,0,1.0"]


def test_without_checkpoint_it_warns_and_names_imagenet_classes(photos, capsys):
    predict.main([str(photos / "a.jpg"), "--model", "tokenformer_tiny", "--json"])
    captured = capsys.readouterr()
    assert "random weights" in captured.err
    descriptions = ImageNetInfo().label_descriptions()
    for guess in json.loads(captured.out)["top"]:
        assert guess["label"] == descriptions[guess["index"]]


@pytest.mark.parametrize("option", ["--model", "--checkpoint"])
def test_a_model_whose_weights_are_in_the_package(option, photos, capsys):
    predict.main([str(photos / "a.jpg"), option, "tokenformer_cifar10_micro", "--json"])
    captured = capsys.readouterr()
    assert captured.err == ""
    trained = timm.create_model("tokenformer_cifar10_micro", pretrained=True).eval()
    expected = by_hand(trained, photos / "a.jpg")
    for guess in json.loads(captured.out)["top"]:
        assert guess["label"] == trained.pretrained_cfg["label_names"][guess["index"]]
        assert guess["probability"] == pytest.approx(expected[guess["index"]].item(), rel=1e-4)


def test_channels_that_no_image_has_are_refused(photos, tmp_path):
    save_model(timm.create_model("tokenformer_tiny", in_chans=4, **KWARGS), tmp_path)
    with pytest.raises(InputError, match="takes 4 channels, but images are read as grey or RGB"):
        predict.main([str(photos), "--checkpoint", str(tmp_path)])


def test_diverged_weights_are_not_reported_as_an_answer(exported, photos, tmp_path):
    state = load_file(exported / "model.safetensors")
    state["head.weight"][:] = torch.finfo().max  # finite, unlike what they compute
    save_file(state, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((exported / "config.json").read_text())
    with pytest.raises(InputError, match="the model's output is not finite"):
        predict.main([str(photos), "--checkpoint", str(tmp_path)])


def test_unreadable_images_are_named_and_the_status_is_1(exported, photos, tmp_path, command):
    (tmp_path / "cut.jpg").write_bytes((photos / "c.JPEG").read_bytes()[:900])
    (tmp_path / "link.png").symlink_to("nowhere")
    done = command.process("predict", tmp_path, photos, "--json", "--checkpoint", exported)
    assert done.status == 1
    files = [json.loads(line)["file"] for line in done.out.splitlines()]
    assert files == [str(photos / name) for name in NAMES]
    said = [line.split(": ")[:2] for line in done.err.splitlines()]
    assert said == [["skipped", str(tmp_path / name)] for name in ("cut.jpg", "link.png")]
