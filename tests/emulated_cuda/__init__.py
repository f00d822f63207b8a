"""An emulated CUDA device for tests: it allocates, counts, compiles and runs as a card does, without a card.

``device.cpp`` gives ATen its memory and the CPU's kernels, ``card.py`` an H100's properties, and Triton's interpreter takes the
place of Triton's compiler. It needs a torch without CUDA, g++ and triton. A new check belongs in a ``check_*.py`` that
``tests/training/test_emulated_cuda.py`` names. It shows no speed, no workspaces of libraries, no races between streams and no
replays of CUDA graphs.
"""
