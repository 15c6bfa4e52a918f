# Small images in class folders, train/<class>/* and val/<class>/*. A config gives both pipelines.
_base_ = "imagenet.py"

train_dataloader = dict(
    dataset=dict(
        _delete_=True,
        type="CustomDataset",
        data_root="",
        data_prefix="train",
        with_label=True,
        pipeline=[],
    ),
)
val_dataloader = dict(
    dataset=dict(train_dataloader["dataset"], data_prefix="val", test_mode=True),
)
test_dataloader = val_dataloader
