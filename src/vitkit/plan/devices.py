"""What a plan knows of each kind of device: figures of the makers' data sheets, and a price to start from.

Compute is dense, with fp32 accumulation. Links are per device and direction; `network` is what one device
gets of its machine's network. Prices are round figures for an hour on demand; give your own with --price.
"""

from __future__ import annotations

from dataclasses import dataclass

GB = 1e9


@dataclass(frozen=True)
class Device:
    name: str
    memory: float  # bytes; 0: not known
    tflops: float  # bf16 or fp16; 0: measured when planning
    tflops_fp32: float  # with TF32 where there is one
    bandwidth: float  # bytes per second of its own memory
    link: float  # bytes per second to its neighbours in one machine
    network: float  # bytes per second to other machines
    price: float  # dollars for an hour


DEVICES: dict[str, Device] = {
    "h100": Device("H100 SXM 80 GB", 80 * GB, 989, 495, 3350 * GB, 450 * GB, 50 * GB, 3.0),
    "a100": Device("A100 SXM 80 GB", 80 * GB, 312, 156, 2039 * GB, 300 * GB, 25 * GB, 1.8),
    "l4": Device("L4 24 GB", 24 * GB, 121, 60, 300 * GB, 16 * GB, 3 * GB, 0.7),
    "rtx3090": Device("RTX 3090 24 GB", 24 * GB, 71, 35.5, 936 * GB, 16 * GB, 3 * GB, 0.3),
    "cpu": Device("this CPU", 0, 0, 0, 0, 5 * GB, 1 * GB, 0.0),
}
