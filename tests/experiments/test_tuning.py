"""Each method of tuning trains the stated number of parameters, from the right weights."""

import hashlib

import pytest
import timm
from mmengine.registry import DefaultScope
from mmpretrain.registry import MODELS
from safetensors.torch import save_file
from softmax import QUESTION as SOFTMAX
from tuning import QUESTION as TUNING

from tokenformer_vit.errors import InputError
from tokenformer_vit.experiments import image_models, record
from tokenformer_vit.experiments import plan as plans
from tokenformer_vit.experiments.sweep import parse, sweep
from tokenformer_vit.training.config import load_config

SIZES = {"img_size": 8, "patch_size": 4, "embed_dim": 96, "depth": 1, "num_heads": 3}
HEAD = 97 * 10


@pytest.fixture
def weights(tmp_path):
    """Weights of a TokenFormer and of the matched ViT, where a sweep writes them."""
    paths = {}
    for folder, model in (
        ("large_seed0", {"model_name": "tokenformer_tiny"}),
        ("vit_seed0", {"model_name": "vit_base_patch16_224", "mlp_ratio": 6.0}),
    ):
        paths[folder] = tmp_path / folder / "model.safetensors"
        paths[folder].parent.mkdir()
        save_file(timm.create_model(**model, **SIZES, num_classes=10).state_dict(), paths[folder])
    return paths


@pytest.fixture
def words(tmp_path, config, digits, weights):
    start = f"model.backbone.checkpoint_path='{weights['large_seed0']}'"
    growth = "dict(num_ffn_param_tokens=400,freeze='old')"
    config.write_text(
        config.read_text().replace("depth=1", f"depth=1, checkpoint_path='', growth={growth}")
    )
    options = {"config": config, "data-root": digits, "work-dir": tmp_path / "work"}
    options["out"] = tmp_path / "results" / "tuning_small"
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    return [*words, "--cfg-options", start.replace("'", "")]


def plan(words, *more, question=TUNING):
    return plans.plan(question, parse(question, [*words, *more]))


def test_the_methods_train_what_they_are_compared_for(words, weights):
    planned = {run.about["variant"]: run for run in plan(words)}
    assert list(planned) == [variant.name for variant in TUNING.variants]
    trainable = {name: run.about["trainable"] for name, run in planned.items()}
    parameters = {name: run.about["parameters"] for name, run in planned.items()}
    assert trainable["probe"] == trainable["vit_probe"] == HEAD
    for size, rank in (("small", 4), ("large", 16)):
        few = rank * (8 * 96 + 2 * 576)  # LoRA in a block of the ViT, whose hidden layer has 576
        assert trainable[f"tokens_{size}"] == trainable[f"lora_{size}"] == few + HEAD
        assert parameters[f"tokens_{size}"] == parameters["full"] + few
        assert parameters[f"lora_{size}"] == parameters["vit_full"] + few
    for name in ("full", "scratch", "vit_full"):
        assert trainable[name] == parameters[name]
    assert parameters["full"] == parameters["probe"] == parameters["scratch"]
    assert parameters["full"] == pytest.approx(parameters["vit_full"], rel=plans.LARGEST_GAP)

    for name, run in planned.items():
        run.write_config()
        cfg = load_config(run.config)
        start = weights["vit_seed0" if name.startswith(("vit", "lora")) else "large_seed0"]
        digest = hashlib.sha256(start.read_bytes()).hexdigest()
        said = None if name == "scratch" else {"file": str(start), "sha256": digest}
        assert run.about["start"] == said
        backbone = image_models.timm_part(cfg.model.backbone)
        assert backbone.checkpoint_path == ("" if said is None else str(start))
        assert backbone.get("stem_seed") is None
        assert not cfg.get("custom_hooks")
        assert run.about["lr"] == cfg.optim_wrapper.optimizer.lr
        with DefaultScope.overwrite_default_scope("mmpretrain"):
            model = MODELS.build({"data_preprocessor": cfg.data_preprocessor, **cfg.model})
        count = sum(p.numel() for p in model.parameters() if p.requires_grad)
        assert count == trainable[name]


def test_a_dry_run_of_every_method(words, weights, capsys):
    sweep(TUNING, [*words, "--dry-run"])
    number = len(TUNING.variants)
    assert f"{number} of {number} runs are left: " in capsys.readouterr().out


def test_records_of_other_weights_are_not_taken_for_these(words, weights):
    (run,) = plan(words, "--variants", "probe")
    record._write(run, run.about)
    assert record.find_record(run) == run.about
    other = timm.create_model("tokenformer_tiny", **SIZES, num_classes=10).state_dict()
    save_file(other, weights["large_seed0"])
    (again,) = plan(words, "--variants", "probe")
    with pytest.raises(InputError, match=r"other settings, such as start\.sha256: "):
        record.find_record(again)
    run.write_config()
    with pytest.raises(InputError, match=r"the run that it starts from .* there and .* here"):
        again.write_config()


def test_missing_weights_and_the_command_that_makes_them(words, weights):
    weights["vit_seed0"].unlink()
    with pytest.raises(InputError, match=r"vit_seed0/.* to start from: `python ablations/growth"):
        plan(words)
    assert len(plan(words, "--variants", "probe", "scratch")) == 2
    odd = weights["large_seed0"].parent.rename(weights["large_seed0"].parents[1] / "odd")
    words[-1] = f"model.backbone.checkpoint_path={odd / 'model.safetensors'}"
    with pytest.raises(InputError, match=r"but they are in .*odd; rename the folders"):
        plan(words)
    words[-1] = "model.backbone.checkpoint_path="
    with pytest.raises(InputError, match=r"no trained weights.*growth\.py"):
        plan(words)


def test_other_questions_train_from_scratch(words):
    with pytest.raises(InputError, match="an ablation trains from scratch"):
        plan(words, question=SOFTMAX)
