"""The product's path: one plan of shared reads on the host, several kernels that walk it.

plan.py       the format of a plan: what every kernel here reads
planner.py    segment tables -> plans, in C++ (planner_twin.py says the same in Python)
executor.py   the contract between the backend and one implementation
backend.py    FusedBackend: picks an implementation and names the one that ran
"""
