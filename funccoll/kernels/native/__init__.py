"""Kernels of compute for CPUs: text of LLVM's language, a polynomial for each elementary function, and their machine code.

The same text gives the same bits on every x86-64 processor with FMA. LLVM is imported when the first kernel is
compiled. Programs do not use them yet.
"""
