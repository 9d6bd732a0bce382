"""Kernels of compute: text of LLVM's language, a polynomial for each elementary function, and machine code, or PTX for GPUs.

The same text gives the same bits on every x86-64 processor with FMA. LLVM is imported when the first kernel is
compiled.
"""
