"""An emulated CUDA device for tests: it allocates, counts, compiles and runs as a card does, without a card.

| Module | Content |
|---|---|
| `device.cpp` | the device for ATen: memory, numbers of streams, the CPU's kernels |
| `library` | builds and loads it |
| `card` | an H100's properties and memory counters |
| `streams` | streams and events |
| `graphs` | recording of CUDA graphs, with their pool |
| `triton_driver` | Triton's driver for it |
| `attention` | the fused attention kernels as arithmetic |
| `interpreter` | Triton's interpreter, fit for Inductor's kernels |
| `plugin` | a plugin of pytest: the device exists before torch is imported |
| `__main__` | the same for a script: `python -m emulated_cuda SCRIPT` |
| `steps` | training steps on the card, with their gradients and peaks |
| `small_models`, `cells` | small models under budgets, as tests and `benchmarks/emulated_card.py` run them |
| `write_cells` | writes the cells of all models |
| `named` | steps that are also planned by the card's name, in a process without the card |
| `check_*.py` | the tests, in a process of their own; `tests/test_emulated_cuda.py` runs them |

The device belongs to the tests alone. Its events measure the host. It shows nothing of speed, workspaces of cuBLAS and cuDNN,
fragmentation, autotuning and races. It records CUDA graphs and replays none. Triton's interpreter takes the place of Triton's
compiler. Checks of machine code therefore have a process without it.
"""
