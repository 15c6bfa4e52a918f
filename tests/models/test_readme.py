"""The Python blocks of models/README.md, one after another."""

import re
from pathlib import Path

import pytest
import torch

import tokenformer_vit

README = Path(tokenformer_vit.__file__).with_name("models") / "README.md"
TEXT = README.read_text(encoding="utf-8")


@pytest.mark.slow
def test_its_code_runs(tmp_path, monkeypatch):
    runtime = pytest.importorskip("onnxruntime", reason="the last block runs an ONNX file")
    pytest.importorskip("onnxscript", reason="the last block writes an ONNX file")
    monkeypatch.chdir(tmp_path)
    names = {}
    for block in re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL):
        exec(block, names)
    assert names["onnxruntime"] is runtime
    expected = names["model"](names["images"])
    loaded = torch.export.load("model.pt2").module()
    torch.testing.assert_close(loaded(names["images"]), expected)
    logits = torch.from_numpy(names["logits"])
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)
