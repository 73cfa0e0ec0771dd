"""Compiled arithmetic of acting and learning: CPU (`cpu/`), CUDA and Triton, each kernel beside its plain reference."""
