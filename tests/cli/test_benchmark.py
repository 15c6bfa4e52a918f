"""The benchmark prints both models, eager and compiled, in both modes."""

import re

import pytest

from tokenformer_vit.cli import benchmark
from tokenformer_vit.errors import InputError

TINY = ["--model", "tokenformer_tiny", "--model-kwargs", "depth=1", "img_size=32"]
TINY += ["--device", "cpu", "--batch-size", "2", "--rounds", "2"]


def test_speed_and_ratio_of_both_models_in_both_modes(capsys):
    benchmark.main([*TINY, "--eager", "--amp"])
    train, *middle, last = capsys.readouterr().out.splitlines()
    assert (train.split()[0], middle[2].split()[0]) == ("train", "infer")
    for own, line in (("baseline", middle[0]), ("tokenformer_tiny", last)):
        speed, ratio = re.fullmatch(rf"{own} eager +([\d.]+) +([\d.]+) +–", line).groups()
        assert float(speed) > 0
        assert (float(ratio) == 1) == (own == "baseline")


def test_eager_does_not_count_as_compiled(monkeypatch):
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    with pytest.raises(InputError, match=r"TORCHDYNAMO_DISABLE=1 .* give --eager"):
        benchmark.main(TINY)
