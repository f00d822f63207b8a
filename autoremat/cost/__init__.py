"""Costs: from FLOPs and bytes to seconds."""

from autoremat.cost.devices import Device as Device
from autoremat.cost.devices import cpu_device as cpu_device
from autoremat.cost.devices import cuda_device as cuda_device
from autoremat.cost.roofline import roofline_seconds as roofline_seconds
from autoremat.cost.roofline import saving_seconds_per_byte as saving_seconds_per_byte
