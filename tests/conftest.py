"""One thread per process, before torch is imported.

Ranks are forks of the test process, and a fork of a process whose OpenMP threads have worked waits for them for ever.
"""

import os

os.environ["OMP_NUM_THREADS"] = "1"

import torch

torch.set_num_threads(1)
