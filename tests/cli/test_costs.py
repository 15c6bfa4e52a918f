"""The command prints what the package counts; bad input ends in one line."""

import json
from dataclasses import asdict

import pytest
import timm
from timm.models import save_for_hf

from tokenformer_vit.benchmarking.costs import model_costs, total
from tokenformer_vit.cli import costs
from tokenformer_vit.errors import InputError
from tokenformer_vit.models import lm_config


def counts(capsys, *arguments):
    costs.main([*map(str, arguments), "--json"])
    return json.loads(capsys.readouterr().out)


def test_the_table_and_the_json_are_what_the_package_counts(command, capsys):
    words = ("--against", "vit_base_patch16_224", "--tokens", 50)
    for record in counts(capsys, *words):
        parts = model_costs(timm.create_model(record.pop("model")), 50)
        assert record.pop("total") == asdict(total(parts))
        assert record == {name: asdict(each) for name, each in parts.items()}
    done = command.process("costs", *words[:2])
    assert (done.status, done.err) == (0, "")
    title, *_, last = done.out.splitlines()
    assert "tokenformer_base and, on the right, vit_base_patch16_224" in title
    # Training takes three forwards, and a multiplication with an addition is two FLOPs.
    assert last.split() == ["total", "114,759,400", "138.847", "86,567,656", "105.383"]


def test_an_exported_model_and_a_vit_of_equal_width_depth_and_weights(tmp_path, capsys):
    shape = {"depth": 2, "embed_dim": 24, "num_heads": 3, "img_size": 32, "patch_size": 8}
    model = timm.create_model("tokenformer_tiny", **shape, num_ffn_param_tokens=97)
    save_for_hf(model, tmp_path, safe_serialization=True)
    ours, theirs = counts(capsys, "--model", f"local-dir:{tmp_path}")
    assert ours["feed_forward"]["parameters"] == 2 * 2 * 24 * 97
    assert theirs["model"] == f"ViT, {4 * 24 + 97 - 2 * 24} hidden"
    for part in ("embedding", "token_token", "head"):
        assert ours[part] == theirs[part]


def test_language_models(tmp_path, capsys):
    language = pytest.importorskip("tokenformer_vit.language", exc_type=ImportError)
    both = counts(capsys, "--lm", "150m", "--tokens", "7")
    assert [each["model"] for each in both] == ["150m", "GPT-2, 4608 hidden"]
    assert both[0]["feed_forward"]["forward_flops"] == 2 * 7 * 12 * 2 * 768 * 4 * 768
    config = lm_config("tiny", depth=1, vocab_size=61, num_ffn_param_tokens=600)
    language.TokenFormerConfig(**config.__dict__).save_pretrained(tmp_path)
    ours, _ = counts(capsys, "--lm", str(tmp_path))
    assert ours["feed_forward"]["parameters"] == 2 * 128 * 600


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--model tokenformer_tiny --tokens 1", "num_tokens is 1: no token is left"),
        ("--model vit_tiny_patch16_224", "give --against NAME"),
        ("--lm 15m", "no preset or folder 15m; choose of 150m"),
        ("--lm tiny --model tokenformer_tiny", "--lm cannot be combined with --model"),
    ],
)
def test_bad_input(words, message):
    with pytest.raises(InputError, match=message):
        costs.main(words.split())
