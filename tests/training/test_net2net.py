"""Net2Net widens the hidden layers of Transformers and keeps their outputs; stacking deepens."""

from typing import Any

import pytest
import timm
import torch
import torch.nn.functional as F
from torch import nn

pytest.importorskip("transformers", reason="pip install '.[language]'")

from transformers import AutoModelForCausalLM

from tokenformer_vit.errors import InputError
from tokenformer_vit.language import transformer_lm
from tokenformer_vit.training.net2net import stack_blocks, widen_mlp

TOKENS = torch.randint(61, (2, 9))
POSITIONS = pytest.mark.parametrize("positions", ["learned", "rotary"])


class Wrapper(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model


def build(positions="learned"):
    model = transformer_lm(61, 40, 32, 2, 2, hidden_features=48, positions=positions)
    with torch.no_grad():  # so that every weight and bias tells
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model.eval()


def step(model, optimizer):
    model(TOKENS, labels=TOKENS).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize(("dtype", "atol"), [(torch.float32, 1e-5), (torch.float64, 1e-12)])
@pytest.mark.parametrize("wrap", [lambda model: model, Wrapper], ids=["bare", "wrapped"])
def test_the_wider_model_computes_what_it_did(dtype, atol, wrap):
    model = build().to(dtype)
    before = model(TOKENS).logits
    module = wrap(model)
    assert widen_mlp(module, 131) is module
    scale = before.abs().max().item()
    torch.testing.assert_close(model(TOKENS).logits, before, rtol=0, atol=atol * scale)
    assert model.config.n_inner == 131
    for block in model.transformer.h:
        assert (block.mlp.c_fc.nf, block.mlp.c_proj.nx) == (131, 131)
        assert block.mlp.c_fc.weight.shape == (32, 131)
        assert block.mlp.c_proj.weight.shape == (131, 32)
        # 48 neurons, whose copies differ in their shares alone.
        assert len(torch.unique(block.mlp.c_proj.weight, dim=0)) == 131
        assert torch.unique(block.mlp.c_fc.weight, dim=1).shape == (32, 48)


def test_a_wider_gpt_neox_computes_what_it_did():
    model = build("rotary").double()
    before = model(TOKENS).logits
    widen_mlp(model, 131)
    torch.testing.assert_close(model(TOKENS).logits, before, rtol=0, atol=1e-11)
    assert model.config.intermediate_size == 131
    for block in model.gpt_neox.layers:
        layers = block.mlp.dense_h_to_4h, block.mlp.dense_4h_to_h
        assert [layer.weight.shape for layer in layers] == [(131, 32), (32, 131)]
        assert (layers[0].out_features, layers[1].in_features) == (131, 131)
        assert layers[0].weight.unique(dim=0).shape == (48, 32)
        assert layers[1].weight.unique(dim=1).shape == (32, 131)


@POSITIONS
def test_a_saved_wider_model_is_the_same_model(positions, tmp_path):
    model = widen_mlp(build(positions), 80)
    model.save_pretrained(tmp_path)
    read: Any = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    loaded, found = read
    assert not any(found.values()), found
    assert torch.equal(loaded(TOKENS).logits, model(TOKENS).logits)


def test_what_cannot_be_widened_is_said():
    model = build()
    model.transformer.h[1].mlp = build().transformer.h[0].mlp
    widen_mlp(model, 64)
    with pytest.raises(
        InputError, match="an MLP has 64 hidden features; give more than that, not 64"
    ):
        widen_mlp(model, 64)
    with pytest.raises(InputError, match="a TokenFormer grows in its pairs"):
        stack_blocks(model, 4)


def test_nothing_changes_where_one_block_cannot_be_widened():
    model = build()
    model.transformer.h[1].mlp.c_fc.nf = 90
    weights = {name: p.clone() for name, p in model.named_parameters()}
    with pytest.raises(InputError, match="an MLP has 90 hidden features"):
        widen_mlp(model, 80)
    assert all(torch.equal(p, weights[name]) for name, p in model.named_parameters())
    assert model.config.n_inner == 48


def test_a_vit_and_its_optimizer_go_on():
    shape = {"embed_dim": 16, "depth": 2, "num_heads": 2, "img_size": 16, "patch_size": 8}
    vit: Any = timm.create_model("vit_tiny_patch16_224", **shape, num_classes=3).eval()
    matrices = [p for p in vit.parameters() if p.dim() > 1]
    others = [p for p in vit.parameters() if p.dim() < 2]
    groups = [{"params": matrices}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3)
    x = torch.randn(4, 3, 16, 16)

    def step_vit():
        optimizer.zero_grad()
        F.cross_entropy(vit(x), torch.tensor([0, 1, 2, 1])).backward()
        optimizer.step()

    step_vit()
    before, moments = vit(x), optimizer.state[vit.blocks[0].mlp.fc2.weight]["exp_avg"].clone()
    widen_mlp(vit, 100, optimizer=optimizer)
    torch.testing.assert_close(vit(x), before, rtol=0, atol=1e-5)
    carried = optimizer.state[vit.blocks[0].mlp.fc2.weight]["exp_avg"]
    assert torch.equal(carried[:, :64], moments)
    assert not carried[:, 64:].any()
    again = timm.create_model("vit_tiny_patch16_224", **{**shape, **vit._model_args})
    again.load_state_dict(vit.state_dict())
    step_vit()

    stack_blocks(vit, 5, optimizer=optimizer)
    for part, like in zip(vit.blocks[4].parameters(), vit.blocks[0].parameters(), strict=True):
        assert torch.equal(part, like)
    places = {parameter: place for place, parameter in enumerate(vit.parameters())}
    for group, decays in zip(optimizer.param_groups, (True, False), strict=True):
        expected = [places[p] for p in vit.parameters() if (p.dim() > 1) is decays]
        assert [places[p] for p in group["params"]] == expected  # PyTorch loads by position
    step_vit()
    assert not torch.equal(vit.blocks[2].mlp.fc1.weight, vit.blocks[0].mlp.fc1.weight)
