#!/usr/bin/env bash
# Measure what needs an NVIDIA GPU, also on a machine without a network.
#   tools/gpu_day.sh prepare CIFAR10 IMAGENET   here: folders with parquet files, and with val/
#   tools/gpu_day.sh run OUT [STEP ...]         there, in a copy of the clone with build/gpu
# The other machine has Python 3.12, torch, torchvision, pandas, pyarrow, scikit-learn, pytest-xdist.
set -euo pipefail
cd "$(dirname "$0")/.."
kit=$PWD/build/gpu python=${PYTHON:-.venv/bin/python} # of prepare
batches=${BATCHES:-128 256} # images a step, split at spaces
# EPOCHS, SEEDS and RUNS (a suffix of their folders) are those of the long trainings.
if [[ ${1:-} == prepare ]]; then
    mkdir -p "$kit/imagenet"
    "$python" -m pip freeze | grep -E '^(mm(engine|cv-lite|pretrain)|addict|datasets|dill|importlib.metadata|lazy-importer|mat4py|model-?index|multiprocess|ordered-set|platformdirs|simplejpeg|termcolor|yapf|timm)==' >"$kit/wheels.txt"
    "$python" -m pip download --quiet --no-deps --only-binary=:all: --python-version 3.12 \
        --platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64 --dest "$kit/wheels" --requirement "$kit/wheels.txt"
    cp -rT "$2" "$kit/cifar10" && cp -rT "$3/val" "$kit/imagenet/val"
    git ls-files -z | xargs -0 sha256sum >"$kit/files"
    git describe --always --dirty >"$kit/commit" && exec du -sh "$kit"
fi
[[ ${1:-} == run && -n ${2:-} ]] || exec sed -n 2,5p "$0"
sha256sum --quiet --check "$kit/files" # the commit of the records
mkdir -p "$2" && out=$(realpath "$2") only=" ${*:3} "
[[ -d $kit/site ]] || python3 -m pip install --quiet --no-index --no-deps --upgrade --target "$kit/site" "$kit"/wheels/*.whl
TOKENFORMER_VIT_COMMIT=$(cat "$kit/commit")
export TOKENFORMER_VIT_COMMIT PYTHONPATH=$kit/site:$PWD
python3 -c "import tokenformer_vit.training.runner"
step() { # NAME MINUTES COMMAND...: its output is in OUT/NAME.log
    [[ $only == "  " || $only == *" $1 "* ]] || return 0
    timeout "${2}m" python3 "${@:3}" >>"$out/$1.log" 2>&1 || echo "$1 failed, or took too long ($?)"
    [[ ! -e $kit/runs/$1/record.json ]] || cp "$kit/runs/$1/record.json" "$out/$1.json"
    echo "$1: done after $SECONDS s"
}
bench() { step "$1" "$2" tools/benchmark.py --out "$out/$1.json" --precisions autocast "${@:3}"; }
sweep() { # NAME QUESTION CONFIG OPTIONS...: several processes share the runs; finished ones stay
    local dir=$kit/runs/$1${RUNS:-} job
    for ((job = 0; job < ${JOBS:-10}; job++)); do
        step "$1" 10 ablations/sweep.py "$2" --config "configs/$3.py" --data-root "$kit/images" \
            --name "$1_gpu" --work-dir "$dir" "${@:4}" &
    done
    wait
    [[ ! -e $dir/results.csv ]] || cp "$dir/results.csv" "$out/$1.csv" # for report.py --add
}
converge() { # OPTIMISER RATES...: TokenFormer and ViT, batch 256
    sweep "$1" recipes cifar10_stem --variants "tokenformer_$1" "vit_$1" --lr "${@:2}" --lr-length 16 \
        --seeds "${SEEDS:-5}" --cfg-options train_cfg.max_epochs="${EPOCHS:-60}" train_dataloader.batch_size=256
}
step tests 4 -m pytest -q -n 4 -m gpu --continue-on-collection-errors tests &
step data 2 -m tokenformer_vit prepare-data "$kit/cifar10" "$kit/images" &
bench compile 4 --rounds 1 --batch-sizes $batches # fills the compiler's cache meanwhile
wait
bench train 5 --modes train --batch-sizes $batches
bench infer 3 --modes infer --batch-sizes $batches
bench profile 1 --profile
export OMP_NUM_THREADS=1 TORCHINDUCTOR_COMPILE_THREADS=2 # ten processes keep 16 cores busy; MPS lets all compute
nvidia-cuda-mps-control -d && timeout 60 python3 -c "import torch; print(torch.ones(1).cuda())" ||
    { echo "no MPS: the trainings take turns" && echo quit | nvidia-cuda-mps-control || true; }
converge muon 0.001 0.002 0.004 0.008 # one after the other: at once, Muon's 60 epochs took over 500 s
converge adamw 0.001 0.002 0.004
sweep one_step one_step cifar10_micro_50k --lr 0.003 --seeds "${SEEDS:-3}" \
    --cfg-options train_cfg.max_epochs="${EPOCHS:-30}" optim_wrapper.optimizer.type=timm.optim.Muon
echo quit | nvidia-cuda-mps-control || true
unset OMP_NUM_THREADS
bench infer_base 2 --model tokenformer_base --modes infer
bench language 3 --lm 150m --num-tokens 1024
step imagenet 4 -m tokenformer_vit train configs/imagenet_base_matched.py --data-root "$kit/imagenet" --amp \
    --compile --work-dir "$kit/runs/imagenet" --cfg-options train_dataloader.dataset.split=val \
    train_cfg.val_interval=300 default_hooks.checkpoint.interval=300
