# Small images in class folders, train/<class>/* and val/<class>/*. A config gives both pipelines.
_base_ = "imagenet.py"

data = dict(type="CustomDataset", data_root="", with_label=True, pipeline=[])
train_dataloader = dict(dataset=dict(data, _delete_=True, data_prefix="train"))
val_dataloader = dict(dataset=dict(data, _delete_=True, data_prefix="val", test_mode=True))
test_dataloader = val_dataloader
