"""Sample what a host does beside a run: processors, memory, disks, networks, processes, accelerators, energy. No torch.

Modules here read /proc, /sys and NVML. None of them changes what a run computes.
"""
