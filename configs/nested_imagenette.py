# Nested sizes of a pretrained ViT-S/14 on Imagenette at 56 px: 0.4, 0.5 and 0.67 of its FLOPs, by
# 0.3, 0.375 and 0.5 of the pairs of all layers.
#
# Data:      tokenformer-vit prepare-data imagenette_parquet data/imagenette
# Weights:   python tools/pretrained_vit.py vit_small.safetensors
#            tokenformer-vit compress vit_small.safetensors data/imagenette --keep 1 \
#                --model vit_small_patch14_dinov2 --model-kwargs img_size=56 \
#                --save work_dirs/ordered
#            (for ablations/ with --keep 1 0.3 0.375 0.5, its models alone, and with --keep 1
#            --to-vit into work_dirs/ordered_vit, its nested ViT), and in Python, for its sizes:
#                from pathlib import Path
#                from tokenformer_vit.growth import nest
#                from tokenformer_vit.models.checkpoints import save_model
#                from tokenformer_vit.vision.prediction import load_any
#                model = nest(load_any("work_dirs/ordered/keep_1"), (0.3, 0.375, 0.5))
#                save_model(model, Path("work_dirs/nested_vit"))
# Batch:     64
# Hardware:  one CPU core; minutes in ablations/TABLES.md
# Command:   tokenformer-vit train configs/nested_imagenette.py
# Expected:  83.3 % top-1; 74.3, 68.1 and 61.5 % at its sizes (3 seeds; ablations/TABLES.md)
_base_ = "tuning_imagenette.py"

model = dict(
    type="NestedClassifier",
    backbone=dict(
        checkpoint_path="work_dirs/nested_vit/model.safetensors",
        img_size=56,
        growth=None,
        nested=(0.3, 0.375, 0.5),
    ),
)
test_pipeline = _base_.test_pipeline
test_pipeline[1].update(input_size=(3, 56, 56))
train_pipeline = _base_.train_pipeline
train_pipeline[1] = test_pipeline[1]
train_pipeline[2].update(size=56, padding=7)
train_pipeline[4].update(shape=14)
train_dataloader = dict(dataset=dict(share=0.5, pipeline=train_pipeline))
val_dataloader = dict(dataset=dict(pipeline=test_pipeline))
test_dataloader = val_dataloader

optim_wrapper = dict(
    constructor="MergedLayerDecayConstructor",
    optimizer=dict(lr=3e-4),
    paramwise_cfg=dict(layer_decay_rate=0.75),
)
param_scheduler = _base_.param_scheduler
param_scheduler[0].end = param_scheduler[1].begin = 0.2
train_cfg = dict(max_epochs=2, val_interval=2)
