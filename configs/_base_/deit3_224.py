# Second stage of DeiT III's recipe: 20 epochs at 224 px from the weights of the first stage, head
# included. With 1e-5 as the highest rate and as the floor, the rate is constant after the warm-up.
# A config gives the weights to backbone.checkpoint_path, which resamples the positions, and to
# head.init_cfg.checkpoint.
_base_ = "deit3.py"

model = dict(
    backbone=dict(img_size=224),
    head=dict(
        init_cfg=dict(_delete_=True, type="PlainPretrained", checkpoint="", prefix="head."),
        loss=dict(_delete_=True, type="LabelSmoothLoss", label_smooth_val=0.1, mode="original"),
    ),
)

train_pipeline = _base_.train_pipeline
train_pipeline[1].size = 224
train_pipeline[3:-1] = [_base_.rand_augment]
test_pipeline = _base_.test_pipeline
test_pipeline[1].input_size = (3, 224, 224)
train_dataloader = dict(
    batch_size=64, sampler=dict(repeats=1), dataset=dict(pipeline=train_pipeline)
)
val_dataloader = dict(dataset=dict(pipeline=test_pipeline))
test_dataloader = val_dataloader

optim_wrapper = dict(
    optimizer=dict(
        _delete_=True,
        type="AdamW",
        lr=1e-5,
        weight_decay=0.1,
        betas=(0.9, 0.999),
        eps=1e-8,
        fused=None,
    )
)
param_scheduler = _base_.param_scheduler
param_scheduler[0].start_factor = 0.1
train_cfg = dict(max_epochs=20)
auto_scale_lr = dict(base_batch_size=512)
