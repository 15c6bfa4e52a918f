"""The tool prints what the package counts; bad input ends in one line."""

import json
from dataclasses import asdict

import pytest
import timm
from timm.models import save_for_hf

from tokenformer_vit.benchmarking.costs import PARTS, model_costs, total
from tokenformer_vit.cli import costs
from tokenformer_vit.errors import InputError
from tokenformer_vit.models import lm_config

SMALL = {"depth": 2, "embed_dim": 24, "num_heads": 3, "img_size": 32, "patch_size": 8}
WORDS = [f"{key}={value}" for key, value in SMALL.items()]
TINY = ["--model", "tokenformer_tiny", "--model-kwargs", *WORDS, "num_classes=10"]
TINY += ["--against", "vit_tiny_patch16_224", "--against-kwargs", *WORDS]


def counts(capsys, *arguments):
    costs.main([*arguments, "--json"])
    return json.loads(capsys.readouterr().out)


def test_json_is_what_the_package_counts(capsys):
    both = counts(capsys, *TINY, "num_classes=0", "--tokens", "50")
    names = ("tokenformer_tiny", 10), ("vit_tiny_patch16_224", 0)
    for record, (name, classes) in zip(both, names, strict=True):
        assert record.pop("model") == name
        parts = model_costs(timm.create_model(name, **SMALL, num_classes=classes), 50)
        parts["total"] = total(parts)
        assert record == {part: asdict(cost) for part, cost in parts.items()}


def test_table_of_the_real_command(command):
    done = command.process("costs", "--against", "vit_base_patch16_224")
    assert (done.status, done.err) == (0, "")
    title, *_, last = done.out.splitlines()
    assert title.endswith("tokenformer_base (left) and vit_base_patch16_224 (right)")
    assert all(f"\n{label} " in done.out for label in PARTS.values())
    _, ours, our_flops, theirs, their_flops = last.split()
    assert (ours, theirs) == ("114,759,400", "86,567,656")
    # Training takes three forwards, and a multiplication with an addition is two FLOPs.
    assert [round(float(flops) / 6, 2) for flops in (our_flops, their_flops)] == [23.14, 17.56]


def test_an_exported_model_and_a_vit_of_equal_width_depth_and_weights(tmp_path, capsys):
    model = timm.create_model("tokenformer_tiny", **SMALL, num_ffn_param_tokens=97)
    save_for_hf(model, tmp_path, safe_serialization=True)
    ours, theirs = counts(capsys, "--model", f"local-dir:{tmp_path}")
    assert ours["feed_forward"]["parameters"] == 2 * 2 * 24 * 97
    assert theirs["model"] == f"ViT, {4 * 24 + 97 - 2 * 24} hidden"
    parts = ("qkv", "output", "feed_forward")
    flops = [sum(each[part]["forward_flops"] for part in parts) for each in (ours, theirs)]
    assert flops[0] == flops[1]  # of the weights, without biases
    assert all(ours[part] == theirs[part] for part in ("embedding", "token_token", "head"))


def test_language_models(tmp_path, capsys):
    language = pytest.importorskip("tokenformer_vit.language", exc_type=ImportError)
    both = counts(capsys, "--lm", "150m", "--tokens", "7")
    assert [each["model"] for each in both] == ["150m", "Transformer, 4608 hidden"]
    assert both[0]["total"]["parameters"] == 151_881_216
    for each in both:  # as many weights, biases apart
        flops = sum(each[part]["forward_flops"] for part in ("qkv", "output", "feed_forward"))
        assert flops == 2 * 7 * 12 * 2 * 768 * 8 * 768
    config = lm_config("tiny", depth=1, vocab_size=61, num_ffn_param_tokens=600).__dict__
    model = language.TokenFormerForCausalLM(language.TokenFormerConfig(**config))
    model.save_pretrained(tmp_path)
    ours, _ = counts(capsys, "--lm", str(tmp_path))
    assert ours["feed_forward"]["parameters"] == 2 * 128 * 600


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--against resnet18", "ResNet are unknown: give a"),
        ("--model tokenformer_tiny --tokens 1", "num_tokens is 1: no token is left"),
        ("--model vit_tiny_patch16_224", "give the other model with --against"),
        ("--lm 15m", "no preset or folder 15m; choose of 150m"),
        ("--lm tiny --model tokenformer_tiny", "--lm cannot be combined with --model"),
        ("--against-kwargs depth=1", "--against-kwargs needs --against NAME"),
    ],
)
def test_bad_input(words, message):
    with pytest.raises(InputError, match=message):
        costs.main(words.split())
