"""The examples run as a reader runs them, in one short epoch or, slowly, in full."""

import re
import runpy
from pathlib import Path

import pytest
import timm
import torch
from PIL import Image
from timm.data import create_transform

from tokenformer_vit.models.checkpoints import save_model

pytest.importorskip("sklearn")

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.fixture(autouse=True)
def one_thread():
    """Small models gain nothing from threads, which other tests keep busy."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def run(monkeypatch, capsys, name, *arguments):
    """Run an example and return what it prints."""
    monkeypatch.setattr("sys.argv", [name, *arguments])
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    return capsys.readouterr().out


def column(output, pattern):
    return [float(number.replace(",", "")) for number in re.findall(pattern, output)]


LENGTHS = [("--epochs", "1"), pytest.param((), marks=pytest.mark.slow)]
lengths = pytest.mark.parametrize("short", LENGTHS)


@lengths
def test_minimal_grows_without_a_change_of_outputs_and_learns(short, monkeypatch, capsys):
    output = run(monkeypatch, capsys, "minimal.py", *short)
    before, after, trained = column(output, r"([\d,]+) parameters")
    assert before < after == trained
    (change,) = column(output, r"change of an output: (\S+)")
    assert change < 1e-5
    before, after, trained = column(output, r"accuracy ([\d.]+)%")
    assert before == after
    assert short or (after > 90 and trained > 95)


@lengths
def test_appended_pairs_are_a_small_part_and_learn_more_than_a_linear_probe(
    short, monkeypatch, capsys
):
    output = run(monkeypatch, capsys, "append_pairs.py", *short)
    whole, probe, pairs = column(output, r"([\d,]+) trained")
    assert probe < pairs < whole / 20
    whole, probe, pairs = column(output, r"accuracy ([\d.]+)%")
    assert short or (whole > 95 and pairs > max(probe + 10, 90))


@pytest.mark.slow
@pytest.mark.usefixtures("drawn")
def test_zero_keys_keep_the_loss_and_random_pairs_do_not(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    output = run(monkeypatch, capsys, "growth_step.py", "--epochs", "1")
    zero_key, random, none = column(output, r": ([\d.]+) ->")
    assert zero_key == none != random
    assert (tmp_path / "growth_step.png").read_bytes().startswith(b"\x89PNG")


def test_a_converted_vit_has_its_outputs(monkeypatch, capsys):
    output = run(monkeypatch, capsys, "from_vit.py")
    vit, converted, fused, grown, again = column(output, r"([\d,]+) parameters")
    assert vit == fused < again < grown
    assert vit < converted
    assert max(column(output, r"relative error (\S+)")) < 1e-5


def test_quantised_pairs_change_outputs_little(monkeypatch, capsys):
    pytest.importorskip("torchao", reason="pip install torchao")
    (change,) = column(run(monkeypatch, capsys, "quantize.py"), r"change of the outputs: ([\d.]+)%")
    assert 0 < change < 3


def test_a_model_merged_with_itself_keeps_its_outputs(monkeypatch, capsys):
    (change,) = column(run(monkeypatch, capsys, "merge.py"), r"change of the outputs: (\S+)")
    assert change < 1e-5


@torch.no_grad()
@pytest.mark.usefixtures("drawn")
def test_a_planted_pair_responds_to_its_image(monkeypatch, capsys, tmp_path, generator):
    pytest.importorskip("matplotlib")
    shape = {"depth": 3, "img_size": 32, "patch_size": 8, "embed_dim": 48, "num_heads": 3}
    overlay = {"input_size": (3, 32, 32)}
    model = timm.create_model("tokenformer_tiny", pretrained_cfg_overlay=overlay, **shape).eval()
    photos = [tmp_path / f"{index}.png" for index in range(6)]
    for photo in photos:
        Image.fromarray(generator.integers(0, 255, (32, 32, 3), "uint8")).save(photo)
    photos[2].write_bytes(photos[2].read_bytes()[:900])
    transform = create_transform((3, 32, 32), crop_pct=0.875, interpolation="bicubic")
    features = []
    with model.blocks[1].mlp.register_forward_pre_hook(lambda _, given: features.append(given[0])):
        model(transform(Image.open(photos[4]))[None])
    model.blocks[1].mlp.key_param_tokens[123] = 3 * features[0][0, 10] / features[0][0, 10].norm()
    save_model(model, tmp_path / "run")
    words = [tmp_path / "run", *photos, "--columns", 3, "--out", tmp_path / "tokens.png"]
    output = run(monkeypatch, capsys, "inspect_tokens.py", *map(str, words))
    assert f"skipped: {photos[2]}: " in output
    assert re.search(rf"^pair 123: .* in {photos[4]}$", output, re.MULTILINE)
    assert (tmp_path / "tokens.png").read_bytes().startswith(b"\x89PNG")
