"""Predictions agree with the model run by hand; bad input ends in one line and runs no code."""

import importlib
import json

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from timm.data import ImageNetInfo, create_transform, resolve_model_data_config
from timm.models import save_for_hf

from tokenformer_vit import cli
from tokenformer_vit.cli import predict
from tokenformer_vit.errors import InputError
from tokenformer_vit.vision import images

KWARGS = {"depth": 2, "img_size": 32, "patch_size": 8, "embed_dim": 48, "num_heads": 3}
KWARGS_WORDS = ["--model-kwargs", *(f"{key}={value}" for key, value in KWARGS.items())]
LABELS = ["cat", "[bold]dog", "eel"]


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
    """Five images, one of them grey, in a folder and one below it, beside a text file."""
    folder = tmp_path_factory.mktemp("photos")
    (folder / "more").mkdir()
    random = np.random.default_rng(0)
    for name in ("b.png", "a.jpg", "c.JPEG", "more/d.png"):
        noise = random.integers(0, 255, (40, 50, 3), dtype=np.uint8)
        Image.fromarray(noise).save(folder / name)
    Image.fromarray(random.integers(0, 255, (40, 40), dtype=np.uint8)).save(folder / "e.png")
    (folder / "notes.txt").write_text("not an image")
    return folder


def run(*arguments):
    predict.main([str(argument) for argument in arguments])


def run_json(capsys, *arguments):
    run("--json", *arguments)
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def failure(capsys, *arguments):
    """Run, and return the one line on stderr that it must end with."""
    with pytest.raises(SystemExit) as exit_:
        cli.run(lambda _: run(*arguments))
    assert exit_.value.code == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    *before, line = captured.err.splitlines()
    assert all(each.startswith("left out: ") for each in before)
    assert line.startswith("error: ")
    return line


def by_hand(model, path):
    transform = create_transform(**resolve_model_data_config(model, {"input_size": (3, 32, 32)}))
    image = transform(Image.open(path).convert("RGB"))
    with torch.no_grad():
        return model(image[None]).softmax(-1)[0]


def test_json_agrees_with_the_model_run_by_hand(model, exported, photos, capsys):
    # Three batches, the last of one image; the model and its classes come from config.json.
    answers = run_json(
        capsys, photos, "--checkpoint", exported / "model.safetensors", "--batch-size", 2
    )
    names = ["a.jpg", "b.png", "c.JPEG", "e.png", "more/d.png"]
    assert [answer["file"] for answer in answers] == [str(photos / name) for name in names]
    for answer in answers:
        expected = by_hand(model, answer["file"])
        order = expected.argsort(descending=True).tolist()
        assert [guess["index"] for guess in answer["top"]] == order
        assert [guess["label"] for guess in answer["top"]] == [LABELS[i] for i in order]
        torch.testing.assert_close(
            torch.tensor([guess["probability"] for guess in answer["top"]]), expected[order]
        )
    assert len({json.dumps(answer["top"]) for answer in answers}) == 5


def test_local_dir_and_topk(exported, photos, capsys):
    whole = run_json(capsys, photos / "b.png", "--model", f"local-dir:{exported}")
    first = run_json(capsys, photos / "b.png", "--model", f"local-dir:{exported}", "--topk", 1)
    assert len(whole[0]["top"]) == 3  # 5 asked for, 3 there are
    assert first[0]["top"] == whole[0]["top"][:1]


def test_table(exported, photos, capsys):
    run(photos / "a.jpg", photos / "b.png", "--model", f"local-dir:{exported}")
    out = capsys.readouterr().out
    for label in LABELS:  # [bold] is a class's name here, not markup
        assert out.count(label) == 2
    assert out.count("%") == 6


def test_images_on_their_side_are_turned(exported, photos, tmp_path, capsys):
    exif = Image.Exif()
    exif[0x0112] = 6
    with Image.open(photos / "b.png") as image:
        image.transpose(Image.Transpose.ROTATE_90).save(tmp_path / "b.png", exif=exif)
    answers = run_json(
        capsys, photos / "b.png", tmp_path / "b.png", "--model", f"local-dir:{exported}"
    )
    assert answers[0]["top"] == answers[1]["top"]


@pytest.mark.parametrize("wrapped", ["plain", "timm"])
def test_checkpoints_of_every_trainer(wrapped, model, exported, photos, tmp_path, capsys):
    state = model.state_dict()
    other = {name: torch.ones_like(tensor) for name, tensor in state.items()}
    checkpoint = {
        "plain": state,
        "timm": {"state_dict": other, "state_dict_ema": state, "epoch": 3},
    }[wrapped]
    torch.save(checkpoint, tmp_path / "x.pth")
    # The number of classes is the checkpoint's; without names they are numbered.
    answers = run_json(
        capsys,
        photos / "a.jpg",
        *("--model", "tokenformer_tiny", "--checkpoint", tmp_path / "x.pth", *KWARGS_WORDS),
    )
    expected = by_hand(model, photos / "a.jpg")
    assert {guess["label"] for guess in answers[0]["top"]} == {"class 0", "class 1", "class 2"}
    for guess in answers[0]["top"]:
        assert guess["label"] == f"class {guess['index']}"
        assert guess["probability"] == pytest.approx(expected[guess["index"]].item(), rel=1e-4)


def test_without_checkpoint_it_warns_and_names_imagenet_classes(photos, capsys):
    run(photos / "a.jpg", "--model", "tokenformer_tiny", "--json", *KWARGS_WORDS)
    captured = capsys.readouterr()
    assert "random weights" in captured.err
    descriptions = ImageNetInfo().label_descriptions()
    for guess in json.loads(captured.out)["top"]:
        assert guess["label"] == descriptions[guess["index"]]


def test_a_model_whose_weights_are_in_the_package(photos, capsys):
    run(photos / "a.jpg", "--model", "tokenformer_cifar10_micro", "--json")
    captured = capsys.readouterr()
    assert captured.err == ""
    trained = timm.create_model("tokenformer_cifar10_micro", pretrained=True).eval()
    names = trained.pretrained_cfg["label_names"]
    expected = by_hand(trained, photos / "a.jpg")
    for guess in json.loads(captured.out)["top"]:
        assert guess["label"] == names[guess["index"]]
        assert guess["probability"] == pytest.approx(expected[guess["index"]].item(), rel=1e-4)


def test_unreadable_images_are_named_and_skipped(exported, photos, tmp_path, capsys):
    cut = tmp_path / "cut.jpg"
    cut.write_bytes((photos / "c.JPEG").read_bytes()[:900])
    arguments = ["--json", "--model", f"local-dir:{exported}"]
    with pytest.raises(SystemExit) as exit_:
        run(cut, photos / "a.jpg", photos / "notes.txt", *arguments)
    assert exit_.value.code == 1
    captured = capsys.readouterr()
    assert json.loads(captured.out)["file"] == str(photos / "a.jpg")
    assert f"skipped: {cut}: " in captured.err
    assert f"skipped: {photos / 'notes.txt'}: " in captured.err
    with pytest.raises(InputError, match="none of the images"):
        run(cut, *arguments)


def test_missing_image(exported, capsys):
    assert "nowhere.jpg" in failure(capsys, "nowhere.jpg", "--model", f"local-dir:{exported}")


def test_folder_without_images(exported, tmp_path, capsys):
    assert str(tmp_path) in failure(capsys, tmp_path, "--model", f"local-dir:{exported}")


def test_unknown_model(photos, capsys):
    message = failure(capsys, photos, "--model", "tokenformer_bsae")
    assert "tokenformer_bsae cannot be built" in message
    assert "correct its name" in message


def test_no_model(photos, tmp_path, capsys):
    message = failure(capsys, photos)
    assert "names no timm model: name it with --model, or give an exported folder" in message
    save_file({"head.weight": torch.zeros(2, 2)}, tmp_path / "x.safetensors")
    message = failure(capsys, photos, "--checkpoint", tmp_path / "x.safetensors")
    assert "x.safetensors names no timm model: name it with --model" in message


def test_missing_checkpoint_and_folder(photos, tmp_path, capsys):
    arguments = [photos, "--model", "tokenformer_tiny", "--checkpoint", tmp_path / "x.pth"]
    assert str(tmp_path / "x.pth") in failure(capsys, *arguments)
    assert str(tmp_path) in failure(capsys, photos, "--model", f"local-dir:{tmp_path}")


def test_unknown_model_argument(photos, capsys):
    message = failure(capsys, photos, "--model", "tokenformer_tiny", "--model-kwargs", "imgsize=32")
    assert "imgsize" in message


def test_model_argument_without_a_value(photos, capsys):
    message = failure(capsys, photos, "--model", "tokenformer_tiny", "--model-kwargs", "img_size")
    assert "argument --model-kwargs: 'img_size' is not KEY=VALUE" in message


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"patch_size": 16}, ["patch_embed.proj.weight", "(48, 3, 8, 8)", "(48, 3, 16, 16)"]),
        ({"embed_dim": 96}, ["patch_embed.proj.weight", "(48, 3, 8, 8)", "(96, 3, 8, 8)"]),
        ({"depth": 3}, ["blocks.2.attn.query.key_param_tokens is absent in the file"]),
        ({"depth": 1}, ["blocks.1.attn.key.key_param_tokens is (48, 48) in the file and absent"]),
        (
            {"num_qkv_param_tokens": 60},
            ["blocks.0.attn.query.key_param_tokens is (48, 48) in the file and (60, 48)"],
        ),
    ],
)
def test_checkpoint_of_another_model_names_keys_and_shapes(change, said, exported, photos, capsys):
    checkpoint = exported / "model.safetensors"
    words = [f"{key}={value}" for key, value in {**KWARGS, **change}.items()]
    message = failure(
        capsys,
        photos,
        *("--model", "tokenformer_tiny", "--checkpoint", checkpoint, "--model-kwargs", *words),
    )
    for part in [str(checkpoint), "tokenformer_tiny", *said]:
        assert part in message


def test_another_image_size_is_used_only_when_asked(exported, photos, capsys):
    arguments = [photos / "a.jpg", "--model", "tokenformer_tiny"]
    arguments += ["--checkpoint", exported / "model.safetensors"]
    words = {**KWARGS, "img_size": 48}
    assert run_json(
        capsys, *arguments, "--model-kwargs", *(f"{key}={value}" for key, value in words.items())
    )
    del words["img_size"]
    assert run_json(
        capsys, *arguments, "--model-kwargs", *(f"{key}={value}" for key, value in words.items())
    ) == run_json(capsys, photos / "a.jpg", "--checkpoint", exported)


def test_wrong_number_of_classes(exported, photos, capsys):
    message = failure(capsys, photos, "--model", f"local-dir:{exported}", "--num-classes", 5)
    assert "head.weight is (3, 48) in the file and (5, 48)" in message


def test_checkpoint_that_would_run_code_is_refused(photos, tmp_path, capsys, bomb):
    torch.save({"state_dict": {}, "bomb": bomb}, tmp_path / "x.pth")
    message = failure(
        capsys, photos, "--model", "tokenformer_tiny", "--checkpoint", tmp_path / "x.pth"
    )
    assert str(tmp_path / "x.pth") in message
    assert "run code" in message


@pytest.mark.parametrize("suffix", ["pth", "safetensors"])
def test_damaged_checkpoint(suffix, photos, tmp_path, capsys):
    path = tmp_path / f"x.{suffix}"
    path.write_bytes(b"\x10\x00\x00\x00\x00\x00\x00\x00 no checkpoint")
    arguments = [photos, "--model", "tokenformer_tiny", "--checkpoint", path]
    assert str(path) in failure(capsys, *arguments)


def test_checkpoint_without_a_state_dict(photos, tmp_path, capsys):
    torch.save({"epoch": 3, "net": {"x": torch.zeros(1)}}, tmp_path / "x.pth")
    message = failure(
        capsys, photos, "--model", "tokenformer_tiny", "--checkpoint", tmp_path / "x.pth"
    )
    assert "epoch, net" in message


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("head.bias", torch.nan, "the model's output is not finite"),
        ("head.weight", torch.finfo().max, "the model's output is not finite"),
    ],
)
def test_diverged_weights_are_not_reported_as_an_answer(
    exported, photos, tmp_path, capsys, name, value, expected
):
    state = load_file(exported / "model.safetensors")
    state[name][:] = value
    save_file(state, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((exported / "config.json").read_text())
    message = failure(capsys, photos, "--checkpoint", tmp_path / "model.safetensors")
    assert expected in message


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_device_that_is_not_there(exported, photos, capsys):
    message = failure(capsys, photos, "--model", f"local-dir:{exported}", "--device", "cuda")
    assert "use cpu" in message


def test_real_command_has_clean_stdout_and_status(exported, photos, command, in_another_process):
    arguments = [photos / "notes.txt", photos, "--json", "--model", f"local-dir:{exported}"]

    def work():
        # Pillow warns of images between its limit and twice its limit; these have 2,000 pixels.
        Image.MAX_IMAGE_PIXELS = 1500
        importlib.reload(images)  # pytest undid the filter of warnings that it sets
        command.run_file("predict", *arguments)

    done = in_another_process(work)
    assert done.status == 1, done.err
    assert len([json.loads(line) for line in done.out.splitlines()]) == 5
    skipped = f"skipped: {photos / 'notes.txt'}: it is not a readable image"
    assert [line.split(" (")[0] for line in done.err.splitlines()] == [
        f"left out: 1 .txt in {photos}",
        skipped,
    ]


def test_the_command_ends_with_status_2(command):
    done = command("predict", "nowhere.jpg", "--model", "tokenformer_tiny")
    assert done.status == 2
    assert done.err == "error: there is no file or folder nowhere.jpg\n"


def test_real_images(exported, shared_data, capsys):
    folders = sorted(shared_data("imagenet_samples/val").iterdir())[:12]
    answers = run_json(capsys, *folders, "--model", f"local-dir:{exported}")
    assert len(answers) == 12
    for answer in answers:
        assert sum(guess["probability"] for guess in answer["top"]) == pytest.approx(1, abs=1e-5)
