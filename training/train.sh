#!/bin/sh
# Two processes with one thread each; arguments go to train.py.
# The allocator settings keep freed pages: page faults otherwise cost a third of the speed.
export OMP_NUM_THREADS=1 PYTHONPATH=src
export MALLOC_MMAP_MAX_=0 MALLOC_TRIM_THRESHOLD_=4294967296 MALLOC_TOP_PAD_=268435456
exec python -m torch.distributed.run --nproc-per-node 2 --master-port "${PORT:-29611}" training/train.py "$@"
