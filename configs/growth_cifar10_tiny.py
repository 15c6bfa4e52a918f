# cifar10_tiny with growth during the run: a quarter of the pairs, then half, then all.
#
# Paper:     none
# Data:      tokenformer-vit prepare-data cifar10_parquet data/cifar10
#            (download: configs/README.md, "Data")
# Batch:     256 on one GPU
# Hardware:  not run
# Command:   tokenformer-vit train configs/growth_cifar10_tiny.py --amp
# Expected:  not run
_base_ = "cifar10_tiny.py"

model = dict(
    backbone=dict(num_qkv_param_tokens=48, num_proj_param_tokens=48, num_ffn_param_tokens=192)
)
custom_hooks = [
    dict(type="CostHook"),
    dict(
        type="GrowthHook",
        schedule=[
            dict(
                epoch=17,
                num_qkv_param_tokens=96,
                num_proj_param_tokens=96,
                num_ffn_param_tokens=384,
            ),
            dict(
                epoch=34,
                num_qkv_param_tokens=192,
                num_proj_param_tokens=192,
                num_ffn_param_tokens=768,
            ),
        ],
    ),
]
