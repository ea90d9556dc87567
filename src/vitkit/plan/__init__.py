"""What a training run will need, before it is begun: memory, steps, hours, money.

from vitkit.plan import Setup, plan
plan(Setup("vit-b/16", images=1_281_167, gpus=8, device="a100")).hours
"""

from vitkit.plan.devices import DEVICES as DEVICES
from vitkit.plan.devices import Device as Device
from vitkit.plan.estimate import Plan as Plan
from vitkit.plan.estimate import Setup as Setup
from vitkit.plan.estimate import plan as plan
from vitkit.plan.memory import Memory as Memory

__all__ = ["DEVICES", "Device", "Memory", "Plan", "Setup", "plan"]
