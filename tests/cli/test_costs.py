"""The tool prints what the package counts; bad input ends in one line."""

import json

import pytest
import timm
from timm.models import save_for_hf

from tokenformer_vit.benchmarking.costs import PARTS, model_costs
from tokenformer_vit.cli import costs
from tokenformer_vit.command_line import run_tool
from tokenformer_vit.growth import grow
from tokenformer_vit.models import lm_config

SMALL = {"depth": 2, "embed_dim": 24, "num_heads": 3, "img_size": 32, "patch_size": 8}
FEW = ["--model-kwargs", "num_ffn_param_tokens=1", "num_qkv_param_tokens=1"]
WORDS = [f"{key}={value}" for key, value in SMALL.items()]
TINY = ["--model", "tokenformer_tiny", "--model-kwargs", *WORDS]
TINY += ["--against", "vit_tiny_patch16_224", "--against-kwargs", *WORDS]


def failure(capsys, *arguments):
    """Run, and return the one line on stderr that it must end with."""
    with pytest.raises(SystemExit) as exit_:
        run_tool(lambda: costs.main([str(argument) for argument in arguments]))
    assert exit_.value.code == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert captured.err.count("\n") == 1
    return captured.err


def test_json_is_what_the_package_counts(capsys):
    costs.main([*TINY, "num_classes=0", "--tokens", "50", "--json"])
    records = json.loads(capsys.readouterr().out)
    for record, name, more in zip(
        records,
        ("tokenformer_tiny", "vit_tiny_patch16_224"),
        ({}, {"num_classes": 0}),
        strict=True,
    ):
        model = timm.create_model(name, **SMALL, **more)
        assert record.pop("model") == name
        whole = record.pop("total")
        assert whole["parameters"] == sum(p.numel() for p in model.parameters())
        assert list(record) == list(PARTS)
        for part, cost in model_costs(model, 50).items():
            assert record[part]["training_flops"] == 3 * cost.forward_flops
            assert record[part]["parameters"] == cost.parameters
        for key, value in whole.items():
            assert value == sum(counts[key] for counts in record.values())


def test_table_of_the_real_command(command, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    done = command.process("costs", "--against", "vit_base_patch16_224")
    assert (done.status, done.err) == (0, "")
    title = " ".join(done.out.partition("┏")[0].split())
    assert title.endswith("tokenformer_base (left) and vit_base_patch16_224 (right)")
    for label in PARTS.values():  # none is wrapped
        assert f"│ {label} " in done.out
    _, ours, our_flops, theirs, their_flops = done.out.splitlines()[-2].split("│")[1:-1]
    assert (ours.strip(), theirs.strip()) == ("114,759,400", "86,567,656")
    # Training takes three forwards, and a multiplication with an addition is two FLOPs.
    assert round(float(our_flops) / 6, 2) == 23.14
    assert round(float(their_flops) / 6, 2) == 17.56


def test_the_default_comparison_is_of_equal_width_depth_and_weights(capsys):
    costs.main([*TINY[:2], "--model-kwargs", *WORDS, "num_ffn_param_tokens=97", "--json"])
    ours, theirs = json.loads(capsys.readouterr().out)
    hidden = 4 * 24 + 97 - 2 * 24
    assert theirs["model"] == f"ViT, {hidden} hidden"
    parts = ("qkv", "output", "feed_forward")
    flops = [sum(each[part]["forward_flops"] for part in parts) for each in (ours, theirs)]
    assert flops[0] == flops[1]  # of the weights, without biases
    for part in ("embedding", "token_token", "head"):
        assert ours[part] == theirs[part]


def test_exported_model_with_other_pairs(tmp_path, capsys):
    model = timm.create_model("tokenformer_tiny", **SMALL, num_ffn_param_tokens=75)
    save_for_hf(model, tmp_path, safe_serialization=True)
    capsys.readouterr()
    costs.main(["--model", f"local-dir:{tmp_path}", "--json"])
    captured = capsys.readouterr()
    assert captured.err == ""
    record = json.loads(captured.out)[0]
    assert record["feed_forward"]["parameters"] == 2 * 2 * 24 * 75


def test_language_models(tmp_path, capsys):
    language = pytest.importorskip("tokenformer_vit.language", exc_type=ImportError)
    costs.main(["--lm", "150m", "--tokens", "7", "--json"])
    ours, theirs = json.loads(capsys.readouterr().out)
    assert (ours["model"], theirs["model"]) == ("150m", "Transformer, 4608 hidden")
    assert ours["total"]["parameters"] == 151_881_216
    for part in ("qkv", "output", "feed_forward"):  # together as many weights, biases apart
        ours["weights"] = ours.get("weights", 0) + ours[part]["forward_flops"]
        theirs["weights"] = theirs.get("weights", 0) + theirs[part]["forward_flops"]
    assert ours["weights"] == theirs["weights"] == 2 * 7 * 12 * 2 * 768 * 8 * 768

    config = language.TokenFormerConfig(**lm_config("tiny", depth=1, vocab_size=61).__dict__)
    model = language.TokenFormerForCausalLM(config)
    grow(model, num_ffn_param_tokens=600)
    model.save_pretrained(tmp_path)
    capsys.readouterr()
    costs.main(["--lm", str(tmp_path), "--json"])
    (ours, _) = json.loads(capsys.readouterr().out)
    assert ours["feed_forward"]["parameters"] == 2 * 128 * 600
    assert "no preset or folder 15m; choose of 150m" in failure(capsys, "--lm", "15m")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--model", "tokenformer_bsae"], "tokenformer_bsae cannot be built"),
        (["--against", "vit_bas_patch16_224"], "vit_bas_patch16_224 cannot be built"),
        (["--against", "resnet18"], "ResNet are unknown: give a"),
        (["--model", "local-dir:nowhere"], "nowhere"),
        ([*TINY[:2], "--model-kwargs", "imgsize=32"], "imgsize"),
        ([*TINY[:2], "--tokens", "1"], "num_tokens is 1: no token is left"),
        (["--model", "vit_tiny_patch16_224"], "give the other model with --against"),
        ([*TINY[:2], *FEW], "width"),
        ([*TINY[:2], "--model-kwargs", "num_classes=x"], "cannot be built"),
        ([*TINY[:2], "--model-kwargs", "model_name=x"], "model_name"),
    ],
)
def test_bad_input(arguments, said, capsys):
    assert said in failure(capsys, *arguments)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--model-kwargs", "depth"], "KEY=VALUE"),
        (["--lm", "tiny", "--model", "tokenformer_tiny"], "--lm cannot be combined"),
        (["--against-kwargs", "depth=1"], "--against-kwargs needs --against"),
    ],
)
def test_slips_on_the_command_line(arguments, said, capsys):
    with pytest.raises(SystemExit):
        costs.main(arguments)
    assert said in capsys.readouterr().err.splitlines()[-1]
