# ImageNet-1K in folders, train/<wnid>/*.JPEG and val/<wnid>/*.JPEG, at 224 px.
# Augmentation is that of MAE's supervised recipe (arXiv:2111.06377, Table 11) as mmpretrain runs it
# (vit-base-p16_32xb128-mae_in1k), which adds random erasing.
data_preprocessor = dict(
    type="LabelPreprocessor",
    num_classes=1000,
    mean=[123.675, 116.28, 103.53],
    std=[58.395, 57.12, 57.375],
)

rand_augment = dict(
    type="FastRandAugment",
    policies="timm_increasing",
    num_policies=2,
    total_level=10,
    magnitude_level=9,
    magnitude_std=0.5,
    hparams=dict(pad_val=[124, 116, 104], interpolation="bicubic"),
)
train_pipeline = [
    dict(type="LoadImage"),
    dict(type="v2/RandomResizedCrop", size=224, interpolation="bicubic"),
    dict(type="v2/RandomHorizontalFlip", p=0.5),
    rand_augment,
    dict(
        type="RandomErasing",
        erase_prob=0.25,
        mode="rand",
        min_area_ratio=0.02,
        max_area_ratio=1 / 3,
        fill_color=[123.675, 116.28, 103.53],
        fill_std=[58.395, 57.12, 57.375],
    ),
    dict(type="PackLabels"),
]
test_pipeline = [
    dict(type="LoadImage"),
    dict(
        type="EvalTransform",
        input_size=(3, 224, 224),
        crop_pct=0.875,
        interpolation="bicubic",
        crop_mode="center",
    ),
    dict(type="PackInputs", meta_keys=()),
]

train_dataloader = dict(
    batch_size=128,
    num_batch_per_epoch=None,  # a number shortens the epochs, each to a random subset
    num_workers="auto",  # the cores of this machine, shared by its processes
    persistent_workers=True,
    pin_memory=True,
    collate_fn=dict(type="default_collate"),
    sampler=dict(type="ResumableSampler", shuffle=True),
    dataset=dict(
        type="ImageNet", data_root="data/imagenet", split="train", pipeline=train_pipeline
    ),
)
val_dataloader = dict(
    train_dataloader,
    num_batch_per_epoch=None,  # a number takes evenly spaced images, the same each time
    sampler=dict(type="DefaultSampler", shuffle=False, round_up=False),
    dataset=dict(type="ImageNet", data_root="data/imagenet", split="val", pipeline=test_pipeline),
)
test_dataloader = val_dataloader
val_evaluator = dict(type="AccuracyAndLoss", topk=(1, 5))
test_evaluator = val_evaluator
