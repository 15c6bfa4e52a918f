"""A model card says what is known of a model, in the hub's form, and nothing else."""

import re

import pytest
import timm
import torch
import yaml

import tokenformer_vit  # noqa: F401
from tokenformer_vit.cli import grow
from tokenformer_vit.models.card import CardFacts, model_card
from tokenformer_vit.models.checkpoints import load_model, save_model

SHAPE = {"img_size": 8, "patch_size": 4, "embed_dim": 24, "depth": 2, "num_heads": 2}


def read(folder):
    """Return the front matter, and the facts of each section."""
    text = (folder / "README.md").read_text(encoding="utf-8")
    _, front, body = text.split("---\n", 2)
    sections = {}
    for part in body.split("\n## ")[1:]:
        title, _, rest = part.partition("\n")
        sections[title] = dict(re.findall(r"^- ([^:]+): (.*)$", rest, re.MULTILINE))
    return yaml.safe_load(front), sections, body


@pytest.fixture
def model():
    return timm.create_model(
        "tokenformer_tiny", num_classes=3, num_ffn_param_tokens=40, theta="softmax", **SHAPE
    )


def test_a_model_alone_is_described_and_nothing_is_invented(model, tmp_path):
    save_model(model, tmp_path / "out", ["ant", "bee", "cat"])
    front, sections, body = read(tmp_path / "out")
    assert front == {
        "library_name": "timm",
        "pipeline_tag": "image-classification",
        "tags": ["image-classification", "timm", "tokenformer"],
        "license": "apache-2.0",
    }
    assert list(sections) == ["Model", "Use", "Citation"]
    facts = sections["Model"]
    assert facts["Parameters"] == f"{sum(p.numel() for p in model.parameters()):,}"
    assert facts["Key-value pairs"] == "q, k, v 24, output 24, FFN 40"
    assert facts["Θ"] == "softmax"
    assert facts["Classes"] == "3 (ant, bee, cat)"
    assert facts["Input"].startswith("3 × 8 × 8 ")
    assert facts["Blocks"] == "2, of width 24"
    assert "2410.23168" in body or "TokenFormer: Rethinking" in body


def test_a_readme_that_somebody_wrote_or_edited_stays(model, tmp_path):
    readme = tmp_path / "README.md"
    readme.write_text("mine")
    save_model(model, tmp_path)
    assert readme.read_text() == "mine"
    assert (tmp_path / "model.safetensors").is_file()
    readme.unlink()
    save_model(model, tmp_path)
    edited = readme.read_text(encoding="utf-8").replace("apache-2.0 #", "cc-by-4.0 #")
    readme.write_text(edited, encoding="utf-8")
    save_model(model, tmp_path, ["ant", "bee", "cat"])
    assert readme.read_text(encoding="utf-8") == edited


def test_a_vit_is_not_called_a_tokenformer(tmp_path):
    model = timm.create_model("vit_tiny_patch16_224", num_classes=0, **SHAPE)
    save_model(model, tmp_path / "out")
    front, sections, body = read(tmp_path / "out")
    assert "tokenformer" not in body.lower()
    assert "tokenformer" not in front["tags"]
    assert sections["Model"]["Classes"] == "0"
    assert front["pipeline_tag"] == "image-feature-extraction"
    assert "features = model(image[None])\n" in body


def test_the_code_of_the_card_loads_the_model(model, tmp_path, monkeypatch):
    save_model(model, tmp_path / "FOLDER", ["ant", "bee", "cat"])
    _, _, body = read(tmp_path / "FOLDER")
    (code,) = re.findall(r"```python\n(.*?)```", body, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    timm.data.transforms_factory.transforms.ToPILImage()(torch.rand(3, 9, 11)).save("image.png")
    names = {}
    exec(code, names)
    assert names["probabilities"].shape == (1, 3)
    assert names["probabilities"].sum().item() == pytest.approx(1)


def test_facts_that_are_not_known_are_left_out():
    facts = CardFacts(
        {"Data": {"Folder": "pets", "Images": None}, "Training": {"Epochs": None}, "Results": {}},
        datasets=["imagenet-1k"],
        metrics=["perplexity"],
    )
    card = model_card("A", "transformers", "text-generation", "import x", facts, tags=["own"])
    front = yaml.safe_load(card.split("---\n")[1])
    assert front["datasets"] == ["imagenet-1k"]
    assert front["metrics"] == ["perplexity"]
    assert front["tags"] == ["text-generation", "transformers", "own"]
    assert "- Folder: pets" in card
    assert not any(word in card for word in ("Images", "Epochs", "Results", "None", "Citation"))


def test_a_name_cannot_add_lines():
    facts = CardFacts({"Data": {"Folder": "a\n## Validation\n- Top-1: 99 %"}})
    card = model_card("A\n---", "timm", "image-classification", "", facts)
    assert "\n## Validation" not in card
    assert card.count("\n---\n") == 1


def test_a_grown_model_says_what_it_grew_from_and_no_results_of_it(model, tmp_path):
    facts = CardFacts({"Validation": {"Top-1 accuracy": "99 %"}}, metrics=["accuracy"])
    save_model(model, tmp_path / "small", facts=facts)
    assert read(tmp_path / "small")[0]["metrics"] == ["accuracy"]
    grow.main([str(tmp_path / "small"), str(tmp_path / "grown"), "--ffn", "48"])
    front, sections, _ = read(tmp_path / "grown")
    assert sections["Model"]["Key-value pairs"].endswith("FFN 48")
    assert sections["Growth"]["Grown from"] == "small"
    assert sections["Growth"]["Key-value pairs before"].endswith("FFN 40")
    assert "Validation" not in sections
    assert "metrics" not in front
    assert load_model(None, tmp_path / "grown").num_classes == 3
