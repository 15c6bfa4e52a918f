"""A new Θ needs only an entry in the table to work everywhere."""

import io
import warnings

import torch
import torch.nn.functional as F
from timm.layers import set_scriptable

from tokenformer_vit.models.checkpoints import load_model, save_model
from tokenformer_vit.ops import THETAS
from tokenformer_vit.ops.theta import Theta


def relu_l1(scores: torch.Tensor, tau: torch.Tensor, eps: float) -> torch.Tensor:
    activation = F.relu(scores)
    return activation / (activation.sum(dim=-1, keepdim=True) / tau + eps)


def test_folders_and_exported_programs(small, images, tmp_path, monkeypatch):
    monkeypatch.setitem(THETAS, "relu_l1", Theta(relu_l1, 1, False, torch.pi))
    model, x, file = small(theta="relu_l1"), images(), io.BytesIO()
    save_model(model, tmp_path / "exported")
    assert torch.equal(load_model(None, tmp_path / "exported")(x), model(x))
    torch.testing.assert_close(torch.export.export(model, (x,)).module()(x), model(x))
    with set_scriptable(True), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.save(torch.jit.script(model), file)
    file.seek(0)
    torch.testing.assert_close(torch.jit.load(file)(x), model(x))
