"""What all GPU backends share: pools of pages and states, sequences over them, whole cycles as CUDA graphs.

Memory, streams and captured graphs are PyTorch's for every backend, so there is one way to hold them; a backend only
enqueues its graphs. On a machine without a GPU everything here runs on the CPU.
"""
