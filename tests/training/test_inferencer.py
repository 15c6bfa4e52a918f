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


@pytest.fixture(scope="module")
def images(data_root, tmp_path_factory):
    """Files of every class, and larger ones: PNG, which every decoder reads alike."""
    files = [data_root / "val" / name / f"{index}.png" for name in CLASSES for index in range(4)]
    folder = tmp_path_factory.mktemp("larger")
    rng = np.random.default_rng(3)
    for index, shape in enumerate([(8, 13, 3), (20, 15, 3), (31, 40, 3)]):
        files.append(folder / f"{index}.png")
        Image.fromarray(rng.integers(0, 256, shape, dtype=np.uint8)).save(files[-1])
    return files


@pytest.mark.parametrize("given", ["path", "config"])
def test_inferencer_agrees_with_the_export(given, config, trained, images):
    inferencer = ImageClassificationInferencer(
        model=str(config) if given == "path" else load_config(config),
        pretrained=str(trained.work_dir / "epoch_2.pth"),
        device="cpu",
    )
    assert tuple(inferencer.classes) == CLASSES  # the checkpoint's: the config names none
    results = inferencer([str(path) for path in images], batch_size=4)

    model = timm.create_model(f"local-dir:{trained.work_dir}", pretrained=True).eval()
    transform = create_transform(**resolve_model_data_config(model))
    assert len(results) == len(images)
    for path, result in zip(images, results, strict=True):
        with torch.no_grad():
            expected = model(transform(Image.open(path))[None]).softmax(-1)[0]
        np.testing.assert_allclose(result["pred_scores"], expected, rtol=1e-4, atol=1e-6)
        assert result["pred_label"] == expected.argmax()
        assert result["pred_class"] == CLASSES[expected.argmax()]
        assert result["pred_score"] == pytest.approx(expected.max().item(), rel=1e-4)
    assert len({result["pred_class"] for result in results}) > 1
