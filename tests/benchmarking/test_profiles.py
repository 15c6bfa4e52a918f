"""The parts of a profile add up, and kernels are sorted by names that PyTorch gives them."""

import json
import platform

import pytest

from tokenformer_vit.benchmarking import profiles
from tokenformer_vit.cli import benchmark

NAMES = {
    "aten::addmm": "matrix products",
    "nvjet_tst_192x192_64x4_2x1_v_bz_coopB_NNT": "matrix products",
    "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_cublas": "matrix products",
    "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_bf16_128x64_nn>": "matrix products",
    "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128>>": "attention",
    "fmha_cutlassB_bf16_aligned_64x64_k64_sm80": "attention",
    "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16": "attention",
    "aten::_fused_adamw_": "optimizer",
    "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<FusedAdam>": "optimizer",
    "_forward_kernel": "theta",
    "backward_kernel_0": "theta",
    "triton_per_fused__unsafe_view_add_div_gelu_linalg_vector_norm_mul_3": "theta",
    "graph_0_cpp_fused_addcmul_div_gelu_gelu_backward_mul_pow_sum_2": "theta",
    "triton_poi_fused__scaled_dot_product_flash_attention_backward_cat_7": "other",
    "triton_per_fused_add_native_layer_norm_1": "layer norm",
    "void at::native::vectorized_layer_norm_kernel<float>": "layer norm",
    "Memcpy HtoD (Pageable -> Device)": "copies",
    "void at::native::reduce_kernel<512, 1>": "other",
}


@pytest.mark.parametrize("name", NAMES)
def test_parts_of_kernels(name):
    assert profiles.part_of(name) == NAMES[name]


@pytest.mark.parametrize(
    ("spans", "expected"),
    [
        ([], (0, 0)),
        ([(2, 3)], (1, 1)),
        ([(5, 8), (1, 2), (6, 7), (7, 9)], (1 + 4, 8)),  # nested, overlapping, out of order
        ([(1, 2), (2, 4)], (3, 3)),
    ],
)
def test_time_that_spans_cover(spans, expected):
    assert profiles.covered(spans) == expected


def test_kernels_that_run_at_the_same_time_share_it():
    figures = profiles._figures([("aten::mm", 3.0), ("aten::gelu", 1.0)] * 5, 10.0, 15.0)
    parts = {part["part"]: part["seconds"] for part in figures["parts"]}
    assert {name: value for name, value in parts.items() if value} == {
        **{"matrix products": 1.5, "theta": 0.5, "idle": 1.0}
    }
    assert [each["calls"] for each in figures["kernels"]] == [1, 1]


def test_a_step_on_the_cpu(tmp_path, capsys):
    out = tmp_path / "deep/profile.json"
    words = ["--profile", "--eager", "--model", "tokenformer_tiny", "--img-size", "32"]
    words += ["--baseline", "vit_tiny_patch16_224", "--depth", "1", "--backends", "auto"]
    words += ["--precisions", "float32", "--batch-sizes", "2", "--device", "cpu"]
    benchmark.main([*words, "--out", str(out)])
    record = json.loads(out.read_text())
    assert record["hardware"].endswith(f"({platform.machine()})")
    assert (record["mode"], record["dtype"], record["batch_size"]) == ("train", "float32", 2)
    baseline, ours = record["profiles"]
    assert [baseline["variant"], ours["variant"]] == ["baseline eager", "auto eager"]
    for entry in (baseline, ours):
        parts = {part["part"]: part["seconds"] for part in entry["parts"]}
        assert list(parts) == list(profiles.PARTS)
        assert sum(parts.values()) == pytest.approx(entry["seconds"], rel=1e-3)
        for part in ("matrix products", "optimizer", "theta"):  # a ViT has a GELU, too
            assert parts[part] > 0
    names = {kernel["name"]: kernel["calls"] for kernel in ours["kernels"]}
    assert names["aten::mm"] > 12  # in a block with five layers
    rows = capsys.readouterr().out.splitlines()
    assert rows[0] == "train, float32, batch 2: ms of a step, and %"
    assert [row[:18].strip() for row in rows[2:-2]] == list(profiles.PARTS)
    assert rows[-1] == f"Done. Record: {out}"
