"""numba-cuda kernels of rollouts and advantages; `hurtle.kernels.loader.load_cuda_kernels` imports them. They need a GPU."""
