"""The tables of READMEs are what the records say."""

import json
import re

import pytest

from tokenformer_vit.experiments import readmes


def variant(name, rate, ratio, seconds, saved, peak):
    return {
        "variant": name,
        "tokens_per_s": rate,
        **dict(zip(("ratio_p20", "ratio_p50", "ratio_p80"), ratio, strict=True)),
        "seconds": seconds,
        "saved_mb_per_token": saved,
        "peak_mib": peak,
        "mfu": 0.414,
    }


def group(mode, compiled, saved):
    one = (1.0, 1.0, 1.0)
    kind = "eager" if mode == "decode" else compiled
    return {
        **{"mode": mode, "precision": "float32", "dtype": "float32", "batch_size": 3},
        "variants": [
            variant(f"baseline {kind}", 1234.5, one, [2.0, 2.0, 2.0], saved and 0.2, 200),
            variant("released eager", 9.0, one, [3.0, 4.5, 3.5], saved and 0.3, 300),
            variant(f"auto {kind}", 87.65, (0.7, 0.8, 0.9), [2.0, 3.0, 2.5], saved, 150),
        ],
    }


def test_rows_of_language_models(tmp_path):
    readme, folder = tmp_path / "README.md", tmp_path / readmes.SPEED
    markers = "<!-- language-speed -->\nold\n<!-- /language-speed -->\n"
    readme.write_text(markers + markers.replace("language-", ""))

    def tables():
        text = readmes.render(tmp_path, {})[readme]
        assert "old" not in text
        of_language, _, of_images = text.partition("<!-- /language-speed -->")
        return of_language, of_images

    assert "| not run | | | | | | | |\n" in tables()[0]
    record = {"model": "150m", "num_tokens": 64, "hardware": "2 cores", "device": "cpu"}
    record |= {"baseline": "transformer"}
    record["groups"] = [group("train", "compiled", 0.15), group("decode", "compiled", None)]
    folder.mkdir(parents=True)
    (folder / "speed_lm_150m_64_cpu.json").write_text(json.dumps(record))
    link = f"[`150m`, 64 tokens, 2 cores]({readmes.SPEED}/speed_lm_150m_64_cpu.json)"
    of_language, of_images = tables()
    assert of_language.endswith(
        f"| {link}, train, float32, batch 3 | 1,234 | 87.7 | 0.80 (0.70–0.90) | 1.50 "
        "| 150.0 / 200.0 = 0.75 | 0.75 | 41 |\n"
        f"| {link}, decode, float32, batch 3 | 1,234 | 87.7 | 0.80 (0.70–0.90) | 1.50 "
        "| – | 0.75 | 41 |\n"
    )
    assert link not in of_images
    record["baseline"] = "transformer, rotary"
    (folder / "speed_lm_150m_64_rotary_cpu.json").write_text(json.dumps(record))
    assert "2 cores, to a transformer, rotary](" in tables()[0]


@pytest.mark.parametrize(
    ("changes", "rows"), [({}, 0), ({"products": "MKL"}, 1), ({"device": "cuda"}, 1)]
)
def test_a_ratio_of_two_libraries_is_left_out(changes, rows, tmp_path):
    readme, folder = tmp_path / "README.md", tmp_path / readmes.SPEED
    readme.write_text("<!-- language-speed -->\n<!-- /language-speed -->\n")
    own = group("train", "compiled", 0.15)
    own["variants"][-1]["variant"] = "fused compiled"
    record = {"model": "150m", "num_tokens": 64, "hardware": "2 cores", "device": "cpu"}
    record |= {"baseline": "transformer", "groups": [own], **changes}
    folder.mkdir(parents=True)
    (folder / "speed_lm_150m_64_cpu.json").write_text(json.dumps(record))
    (text,) = readmes.render(tmp_path, {}).values()
    assert text.count(", train, float32, batch 3 | 1,234 | 87.7 | 0.80 (0.70–0.90) ") == rows


def test_rows_of_images_name_the_gpu_that_was_measured(tmp_path):
    readme, folder = tmp_path / "README.md", tmp_path / readmes.SPEED
    readme.write_text("<!-- speed -->\nold\n<!-- /speed -->\n")
    folder.mkdir(parents=True)

    def rows():
        (text,) = readmes.render(tmp_path, {}).values()
        return text.splitlines()[3:-1]

    not_run = [
        f"{mode}, bfloat16 autocast, batch {batch} | not run |{' |' * 6}"
        for mode in ("train", "infer")
        for batch in (128, 256)
    ]
    assert rows() == [f"| {readmes.ANY_GPU}, {row}" for row in not_run]
    names = {}
    for name, device, batch in (("NVIDIA X1 8GB", "cuda", 128), ("2 CPU cores", "cpu", 3)):
        one = group("train", "compiled", 0.15)
        one |= {"dtype": "bfloat16 autocast", "batch_size": batch}
        for row in one["variants"]:
            for key in ("tokens_per_s", "saved_mb_per_token"):
                row[key.replace("token", "image")] = row[key]
        record = {**readmes._BASE, "hardware": name, "device": device, "groups": [one]}
        (folder / f"speed_{device}.json").write_text(json.dumps(record))
        names[device] = f"[{name}]({readmes.SPEED}/speed_{device}.json)"
    small = {**record, **readmes._SMALL}
    (folder / "speed_a_small_one.json").write_text(json.dumps(small))
    (folder / "speed_of_another.json").write_text(json.dumps({**small, "img_size": 48}))
    *measured, last = rows()
    assert re.match(r"\| `tokenformer_cifar10_micro`, \[2 CPU cores\]\(.*, train, ", last)
    assert measured[0].startswith(f"| {names['cpu']}, train, bfloat16 autocast, batch 3 | 1,234 ")
    assert measured[1].startswith(f"| {names['cuda']}, train, bfloat16 autocast, batch 128 | 1,234")
    assert measured[2:] == [f"| NVIDIA X1 8GB, {row}" for row in not_run[1:]]


@pytest.mark.parametrize(
    ("readme", "link"),
    [
        ("README.md", "configs/results/digits_demo.json"),
        ("configs/README.md", "results/digits_demo.json"),
        ("tokenformer_vit/growth/README.md", "../../configs/results/digits_demo.json"),
    ],
)
def test_links_start_from_the_folder_of_the_readme(tmp_path, readme, link):
    run = {"hardware": "CPU", "dtype": "float32", "epochs": 3, "resumed_at_iteration": 0}
    run |= {"loss_first": 2.5, "loss_last_20_mean": 1.25, "accuracy/top1": 50.0, "seconds": 90}
    for path, text in (
        (tmp_path / readmes.RUNS / "digits_demo.json", json.dumps(run)),
        (tmp_path / readme, "<!-- runs -->\n<!-- /runs -->\n"),
    ):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (text,) = readmes.render(tmp_path, {}).values()
    assert f"({link}) | CPU, float32 | 3 | 2.50 → 1.25 | 50.00 | – | 1.5 |" in text
    assert "`imagenet_base`, the full recipe | not run | | | | | |" in text
