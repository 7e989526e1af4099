"""Inputs that broke attention kernels elsewhere, each with its kind, by theme.

Every test names the public report behind it where there is one. What can run on both devices does:
on the CPU the emulator of the plan, on a GPU the kernel.
"""
