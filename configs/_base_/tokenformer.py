# A TokenFormer backbone under mmpretrain's linear head. A config names the model and its width,
# and may set every argument of the timm model in `backbone`.
model = dict(
    type="ImageClassifier",
    backbone=dict(
        type="TimmClassificationBackbone",
        model_name="tokenformer_base",
        img_size=224,
        patch_size=16,
        theta="gelu_l2",
        norm="none",
        drop_path_rate=0.1,
        checkpoint_path="",  # weights to start from: an exported folder's model.safetensors
        frozen=False,  # True trains only the head: a linear probe
    ),
    neck=None,
    head=dict(
        type="LabelHead",
        num_classes=1000,
        in_channels=768,
        # The loss starts at ln(num_classes).
        init_cfg=dict(type="Constant", layer="Linear", val=0.0),
        loss=dict(type="LabelSmoothLoss", label_smooth_val=0.1, mode="original"),
    ),
    train_cfg=dict(augments=[dict(type="Mixup", alpha=0.8), dict(type="CutMix", alpha=1.0)]),
)
