"""The readable implementation, in Triton: runs in Triton's interpreter, and on GPUs that no other one is for.

    rotate.py     rotations inside kernels
    attend.py     the walk over a plan's KV tiles
    merge.py      the merge of partial results
    append.py     new tokens into pages
    pieces.py     a plan's works, cut where the walk changes (host)
    executor.py   TritonExecutor: plans and tensors to launches

Only executor.py and pieces.py may be imported where Triton is not installed.
"""
