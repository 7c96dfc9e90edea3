"""CUDA C++ kernels, compiled when they are first used on the machine that runs them.

    driver.py     a source file and macros -> a loaded kernel; launching it
    append.py     K and V of new tokens into pages
    merge.py      partial results of a plan -> outputs
    transform.py  K moved to other positions, gathered or copied
    advance.py    a plan after one decode step
    attend.py     the walk of a plan

The device code is in ../csrc/cuda. Every module here lists with `variants()` what the compile gate builds.
"""
