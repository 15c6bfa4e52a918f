"""The record of loading has the time of each config, relative to the first."""

import json

from tokenformer_vit.training.loading_speed import main


def test_configs_are_measured_in_turn(config, data_root, tmp_path, capsys):
    in_memory = tmp_path / "in_memory.py"
    in_memory.write_text(
        f"_base_ = {str(config)!r}\ntrain_dataloader = dict(dataset=dict(type='ImagesInMemory'))\n"
    )
    out = tmp_path / "records" / "loading.json"
    words = [str(config), str(in_memory), "--data-root", str(data_root), "--out", str(out)]
    main([*words, "--rounds", "3", "--images", "100"])  # more than an epoch has
    record = json.loads(out.read_text())
    assert (record["n"], record["images"], record["threads"]) == (3, 100, 1)
    first, second = record["configs"]
    assert (first["config"], second["config"]) == ("small.py", "in_memory.py")
    assert first["ratio_p20"] == first["ratio_p80"] == 1
    rates = [each["images_per_s"] for each in (first, second)]
    ratios = sorted(mine / other for other, mine in zip(*rates, strict=True))
    assert abs(second["ratio_p50"] / ratios[1] - 1) < 0.02  # both are rounded
    assert f"in_memory.py: {sorted(rates[1])[1]:,} images/s" in capsys.readouterr().out
