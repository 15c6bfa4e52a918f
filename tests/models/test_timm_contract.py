import copy

import pytest
import timm
import timm.optim
import torch


@pytest.mark.parametrize("with_parts", [False, True])
def test_gradient_checkpointing_changes_nothing(small, images, parts, with_parts):
    model, x = small(depth=3, **(parts if with_parts else {})).train(), images()
    recomputing = copy.deepcopy(model)
    recomputing.set_grad_checkpointing()
    outputs = [m(x) for m in (model, recomputing)]
    for out in outputs:
        out.square().sum().backward()
    torch.testing.assert_close(*outputs)
    for a, b in zip(model.parameters(), recomputing.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)
        assert a.grad.any()


def layer_and_decay(model, **kwargs):
    optimizer = timm.optim.create_optimizer_v2(model, "adamw", lr=1e-3, weight_decay=0.3, **kwargs)
    names = {id(p): name for name, p in model.named_parameters()}
    return {
        names[id(p)]: (group.get("lr_scale", 1.0), group["weight_decay"])
        for group in optimizer.param_groups
        for p in group["params"]
    }


@pytest.mark.parametrize("layer_decay", [None, 0.5])
@pytest.mark.parametrize("norm", ["weight+bias", "rms"])
def test_weight_decay_is_for_matrices(small, layer_decay, norm, parts):
    groups = layer_and_decay(small(**{**parts, "norm": norm}), layer_decay=layer_decay)
    decayed = {name for name, (_, decay) in groups.items() if decay == 0.3}
    matrices = {name for name in groups if name.endswith("param_tokens")}
    assert decayed == matrices | {"patch_embed.proj.weight", "head.weight"}
    assert all(groups[name][1] == 0 for name in groups.keys() - decayed)


def test_layer_decay_rises_with_depth(small):
    groups = layer_and_decay(small(depth=3, norm="weight+bias"), layer_decay=0.5)

    def scales(prefix):
        return {scale for name, (scale, _) in groups.items() if name.startswith(prefix)}

    prefixes = ["patch_embed", "blocks.0.", "blocks.1.", "blocks.2.", "head"]
    assert [scales(prefix) for prefix in prefixes] == [{0.5**i} for i in (4, 3, 2, 1, 0)]
    assert scales("cls_token") == scales("pos_embed") == {0.5**4}
    assert scales("norm.") == {0.5}
