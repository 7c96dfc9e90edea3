"""The walk of a plan in TileLang 0.1.15 for sm_90a. Only `compiled` and `attend` import TileLang.

variant    what a kernel is fixed to
attend     the kernel
compiled   variants into kernels
executor   plans, launches, the merge
"""
