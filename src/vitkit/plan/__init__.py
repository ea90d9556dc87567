"""What a training run will need: `plan(Setup("vit-b/16", images=1_281_167, gpus=8, device="a100")).hours`."""

from vitkit.plan.assumptions import ASSUMED, Assumptions
from vitkit.plan.estimate import Plan, plan
from vitkit.plan.memory import Memory
from vitkit.plan.scale import Scale, scale
from vitkit.plan.setup import DEVICES, Device, Setup

__all__ = ["ASSUMED", "DEVICES", "Assumptions", "Device", "Memory", "Plan", "Scale", "Setup", "plan", "scale"]
