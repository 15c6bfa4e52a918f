"""Programs that need no code of the package, and number types."""
# pyright: reportPossiblyUnboundVariable=false

import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from timm.layers import set_scriptable

import tokenformer_vit
from tokenformer_vit.models.checkpoints import load_model, save_model
from tokenformer_vit.ops import THETAS
from tokenformer_vit.ops.theta import Theta

from .conftest import LINEAR


def script(model) -> Any:
    with set_scriptable(True), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.jit.script(model)


@pytest.mark.parametrize("theta", THETAS)
def test_torchscript(small, images, theta):
    learned = {"learn_tau": THETAS[theta].norm_order > 0}
    with set_scriptable(True):
        how = {"norm": "bias", "qk_norm": True, "drop_path_rate": 0.1, "pattention_args": learned}
        model, x = small(theta=theta, **how), images()
    torch.testing.assert_close(script(model)(x), model(x))


def disturbed(model):
    """Move all norms and biases from where they start."""
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter) if parameter.ndim == 1 else 0
    return model


ANY_BATCH = ({0: torch.export.Dim("batch")},)


SLOW = [
    pytest.param({"theta": n, "norm": "bias"}, marks=pytest.mark.slow)
    for n in THETAS
    if n != "gelu_l2"
]


@pytest.mark.parametrize("how", [{}, {"stem": "conv", "patch_size": 8, **LINEAR}, *SLOW])
def test_onnx_of_one_image_takes_any_number(small, images, how, tmp_path):
    pytest.importorskip("onnxscript", reason="torch.onnx.export needs onnxscript")
    runtime = pytest.importorskip("onnxruntime", reason="nothing else runs an ONNX file")
    model, file = disturbed(small(depth=1, **how)), tmp_path / "model.onnx"
    torch.onnx.export(model, (images(batch=1),), file, dynamic_shapes=ANY_BATCH, verbose=False)
    session = runtime.InferenceSession(file)
    for batch in (1, 5):
        x = torch.randn(batch, 3, 64, 64)
        (logits,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
        torch.testing.assert_close(torch.from_numpy(logits), model(x), rtol=1e-4, atol=1e-5)


NESTED = {"nested": (0.25, 0.5)}


@pytest.mark.parametrize(
    "how", [{}, {"dynamic_img_size": True}, {"stem": "conv", **LINEAR}, NESTED]
)
def test_other_parts_are_exported(small, images, parts, how, tmp_path):
    how = {**parts, **how}
    model, x = disturbed(small(depth=1, **how)), images()
    with set_scriptable(True):
        scriptable = small(depth=1, **how)
    scriptable.load_state_dict(model.state_dict())
    for each in (model, scriptable):
        each.set_size(0.25 if how.get("nested") else None)
    programs: list[Any] = [script(scriptable), torch.jit.trace(model, x)]
    torch.export.save(
        torch.export.export(model, (x,), dynamic_shapes=ANY_BATCH), tmp_path / "model.pt2"
    )
    programs.append(torch.export.load(tmp_path / "model.pt2").module())
    for program in programs:
        torch.testing.assert_close(program(x), model(x))
    x = images(batch=5)
    torch.testing.assert_close(programs[-1](x), model(x))


def test_export_with_a_free_image_size(small, images, parts):
    model = small(depth=1, **parts, dynamic_img_size=True)
    free = ({2: 16 * torch.export.Dim("rows", min=2, max=20)},)
    program = torch.export.export(model, (images(),), dynamic_shapes=free).module()
    x = torch.randn(2, 3, 112, 64)
    torch.testing.assert_close(program(x), model(x))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("theta", THETAS)
def test_half_precision(small, images, theta, dtype, parts):
    model, x = small(theta=theta, **(parts if theta == "gelu_l1" else {})), images()
    exact = model.double()(x.double())
    out = model.to(dtype)(x.to(dtype))
    assert out.dtype == dtype
    assert (out.double() - exact).norm() < 0.1 * exact.norm()


def relu_l1(scores: torch.Tensor, tau: torch.Tensor, eps: float) -> torch.Tensor:
    activation = F.relu(scores)
    return activation / (activation.sum(dim=-1, keepdim=True) / tau + eps)


def test_a_new_theta_needs_only_an_entry_in_the_table(small, images, tmp_path, monkeypatch):
    monkeypatch.setitem(THETAS, "relu_l1", Theta(relu_l1, 1, False, torch.pi))
    model, x = small(theta="relu_l1"), images()
    save_model(model, tmp_path / "exported")
    assert torch.equal(load_model(None, tmp_path / "exported")(x), model(x))
    torch.testing.assert_close(torch.export.export(model, (x,)).module()(x), model(x))
    torch.testing.assert_close(script(model)(x), model(x))


@pytest.mark.slow
def test_the_code_of_the_page_runs(tmp_path, monkeypatch):
    for module in ("onnxscript", "onnxruntime"):
        pytest.importorskip(module, reason="the last block writes and runs an ONNX file")
    monkeypatch.chdir(tmp_path)
    names, page = {}, Path(tokenformer_vit.__file__).with_name("models") / "README.md"
    for block in re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL):
        exec(block, names)
    expected = names["model"](names["images"])
    loaded = torch.export.load("model.pt2").module()
    torch.testing.assert_close(loaded(names["images"]), expected)
    logits = torch.from_numpy(names["logits"])
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)
