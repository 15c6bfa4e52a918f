"""mmpretrain's own inferencer runs on our config and checkpoint, and agrees with the export."""

import numpy as np
import pytest
import timm
import torch
from mmpretrain import ImageClassificationInferencer
from PIL import Image
from timm.data import create_transform, resolve_model_data_config

from tokenformer_vit.training.config import load_config

CLASSES = ("bright", "dark", "split")  # the folders of conftest.py


@pytest.mark.parametrize("given", ["path", "config"])
def test_inferencer_agrees_with_the_export(given, config, trained, data_root, tmp_path):
    inferencer = ImageClassificationInferencer(
        model=str(config) if given == "path" else load_config(config),
        pretrained=str(trained.work_dir / "epoch_2.pth"),
        device="cpu",
    )
    assert tuple(inferencer.classes) == CLASSES  # the checkpoint's: the config names none
    large = np.random.default_rng(3).integers(0, 256, (31, 40, 3), dtype=np.uint8)
    Image.fromarray(large).save(tmp_path / "large.png")
    files = [data_root / "val" / name / "0.png" for name in CLASSES] + [tmp_path / "large.png"]
    results = inferencer([str(file) for file in files], batch_size=3)

    model = timm.create_model(f"local-dir:{trained.work_dir}", pretrained=True).eval()
    transform = create_transform(**resolve_model_data_config(model))
    for file, result in zip(files, results, strict=True):
        with torch.no_grad():
            expected = model(transform(Image.open(file))[None]).softmax(-1)[0]
        np.testing.assert_allclose(result["pred_scores"], expected, rtol=1e-4, atol=1e-6)
        assert result["pred_class"] == CLASSES[expected.argmax()]
    assert len({result["pred_class"] for result in results}) > 1
