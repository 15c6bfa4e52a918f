"""Released checkpoints: our code computes the authors' formula, which is written out here."""

import math

import pytest
import torch
from safetensors.torch import save_file
from torch.nn.functional import layer_norm

from tokenformer_vit.errors import InputError
from tokenformer_vit.growth import grow
from tokenformer_vit.language import (
    TokenFormerConfig,
    TokenFormerForCausalLM,
    TokenFormerModel,
    from_released,
    read_released,
)
from tokenformer_vit.language.released import released_names
from tokenformer_vit.models import lm_config


def released(depth=12, width=64, vocab=97, pairs=48, ffn=192, device="cpu"):
    """Return a state dict of the released layout, with tensors drawn by the released rule."""

    def drawn(rows, columns, std):
        return torch.randn(rows, columns, device=device) * std

    value_std = 2 / (depth * width**0.5)
    tensors = {"sequential.0.word_embeddings.weight": drawn(vocab, width, 1.0)}
    counts = {f"attention.{part}": pairs for part in ("query", "key", "value", "proj")}
    for block in range(2, depth + 2):
        for part, count in {**counts, "mlp": ffn}.items():
            name = f"sequential.{block}.{part}"
            tensors[f"{name}.key_param_tokens"] = drawn(count, width, 0.02)
            tensors[f"{name}.value_param_tokens"] = drawn(count, width, value_std * 3)
    for part in ("weight", "bias"):
        tensors[f"sequential.{depth + 3}.norm.{part}"] = 1 + drawn(1, width, 0.1)[0]
    return tensors


def released_forward(tensors, tokens, heads, depth=12):
    """The released model: (B, N) tokens to (B, N, V) logits.

    Θ is GELU(√P · A / ‖A‖₂) without eps. Of each head's D dimensions the first R = D / 4 turn:
    dimension r and r + R / 2 by the angle n · 10000^(−2r / R) at position n, whatever the batch.
    """

    def pattention(name, x):
        keys, values = (tensors[f"{name}.{kind}_param_tokens"] for kind in ("key", "value"))
        scores = x @ keys.T
        scores = scores / scores.norm(dim=-1, keepdim=True) * math.sqrt(len(keys))
        return (scores * 0.5 * (1 + torch.erf(scores / math.sqrt(2)))) @ values

    def turn(x):  # (B, N, heads, D)
        half = x.shape[-1] // 8
        frequencies = torch.tensor([10_000 ** (-r / half) for r in range(half)])
        angles = torch.arange(x.shape[1])[:, None, None] * frequencies  # (N, 1, R / 2)
        one, other, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
        cos, sin = angles.cos(), angles.sin()
        return torch.cat((one * cos - other * sin, other * cos + one * sin, rest), dim=-1)

    embedding = tensors["sequential.0.word_embeddings.weight"]
    width, (B, N) = embedding.shape[1], tokens.shape
    later = torch.ones(N, N, dtype=torch.bool).triu(1)
    x = embedding[tokens]
    for block in range(2, depth + 2):
        name = f"sequential.{block}"
        normed = layer_norm(x, (width,), eps=1e-5)
        q, k, v = (
            pattention(f"{name}.attention.{part}", normed).reshape(B, N, heads, width // heads)
            for part in ("query", "key", "value")
        )
        scores = torch.einsum("bnhd,bmhd->bhnm", turn(q), turn(k)) / math.sqrt(width // heads)
        weights = scores.masked_fill(later, -torch.inf).softmax(dim=-1)
        mixed = torch.einsum("bhnm,bmhd->bnhd", weights, v).reshape(B, N, width)
        x = x + pattention(f"{name}.attention.proj", mixed)
        x = x + pattention(f"{name}.mlp", layer_norm(x, (width,), eps=1e-5))
    norm = f"sequential.{depth + 3}.norm"
    x = layer_norm(x, (width,), tensors[f"{norm}.weight"], tensors[f"{norm}.bias"], 1e-5)
    return x @ embedding.T


def convert(tensors, **arguments):
    config, state_dict = from_released(tensors, **arguments)
    model = TokenFormerForCausalLM(config)
    model.model.load_state_dict(state_dict)
    return model.eval()


def assert_released(model, tensors, tokens):
    """Compare logits with the formula; return how large those are."""
    expected = released_forward(tensors, tokens, heads=2)
    largest = expected.abs().max().item()
    torch.testing.assert_close(model(tokens).logits, expected, rtol=1e-5, atol=1e-5 * largest)
    return largest


@pytest.mark.parametrize("size", ["150m", "450m", "900m", "1.5b"])
def test_every_published_size_is_recognised(size):
    preset = lm_config(size, pattention_args={"eps": 0.0})
    with torch.device("meta"):
        model = TokenFormerModel(TokenFormerConfig(**vars(preset)))
    width = preset.embed_dim
    tensors = released(preset.depth, width, 50_304, width, 4 * width, device="meta")
    config, state_dict = from_released(tensors)
    assert config.to_dict() == model.config.to_dict()  # the preset, with its numbers of pairs
    assert state_dict.keys() == model.state_dict().keys()


@torch.no_grad()
def test_a_converted_model_and_a_grown_one_compute_the_released_formula():
    tensors, tokens = released(), torch.randint(97, (2, 24))
    model = convert(tensors, num_heads=2)
    before = model(tokens).logits
    assert_released(model, tensors, tokens)
    counts = {"num_qkv_param_tokens": 112, "num_proj_param_tokens": 112}  # for 48, as 1792 for 768
    grow(model, **counts, num_ffn_param_tokens=448, init="released")
    ours = model.model.state_dict()
    grown = {theirs: ours[name] for theirs, name in released_names(12)}
    for name, old in tensors.items():  # the released code copies the old pairs to the first rows
        assert torch.equal(grown[name][: len(old)], old)
    # The formula takes √P of the new counts. The old pairs alone compute something else.
    largest = assert_released(model, grown, tokens)
    assert (before - model(tokens).logits).abs().max() > 0.1 * largest
    assert from_released(grown, num_heads=2)[0].num_ffn_param_tokens == 448


def test_checkpoints_of_the_authors_training_are_read(tmp_path):
    whole, folder = released(depth=2), tmp_path / "global_step1"
    folder.mkdir()
    for number in {name.split(".")[1] for name in whole}:
        start = f"sequential.{number}."
        own = {n.removeprefix(start): each for n, each in whole.items() if n.startswith(start)}
        torch.save(own, folder / f"layer_{number:>02}-model_00-model_states.pt")
    torch.save(whole, tmp_path / "plain.bin")
    torch.save({"module": whole, "step": 1}, tmp_path / "mp_rank_00.pt")
    save_file({n: each.clone() for n, each in whole.items()}, tmp_path / "a.safetensors")
    for path in (folder, *tmp_path.glob("*.*")):
        torch.testing.assert_close(read_released(path), whole, rtol=0, atol=0)
    (tmp_path / "cut.bin").write_bytes((tmp_path / "plain.bin").read_bytes()[:-9])
    with pytest.raises(InputError, match=r"cut\.bin is damaged"):
        read_released(tmp_path / "cut.bin")
    torch.save({}, folder / "layer_00-model_01-model_states.pt")
    with pytest.raises(InputError, match="second model-parallel process: merge"):
        read_released(folder)
    with pytest.raises(InputError, match="no checkpoint file, and no folder with layer_"):
        read_released(tmp_path / "absent")


def test_what_is_no_released_checkpoint_is_refused():
    whole, value = released(depth=2), "sequential.3.attention.key.value_param_tokens"
    for tensors, message in (
        ({name: whole[name] for name in whole if name != value}, f"{value} is missing"),
        ({**whole, "sequential.9.bias": torch.zeros(1)}, "sequential.9.bias is not part of it"),
        (whole, r"2 blocks of width 64: .*--num-heads"),
    ):
        with pytest.raises(InputError, match=message):
            from_released(tensors)
