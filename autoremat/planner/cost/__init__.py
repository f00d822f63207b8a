"""Costs: converts FLOPs and bytes to seconds."""

from autoremat.planner.cost.devices import DATASHEETS as DATASHEETS
from autoremat.planner.cost.devices import UNKNOWN_GPU as UNKNOWN_GPU
from autoremat.planner.cost.devices import Device as Device
from autoremat.planner.cost.devices import cpu_device as cpu_device
from autoremat.planner.cost.devices import cuda_device as cuda_device
from autoremat.planner.cost.devices import datasheet as datasheet
from autoremat.planner.cost.devices import device_memory as device_memory
from autoremat.planner.cost.rates import BATCH as BATCH
from autoremat.planner.cost.rates import Curve as Curve
from autoremat.planner.cost.rates import Rate as Rate
from autoremat.planner.cost.rates import Rates as Rates
from autoremat.planner.cost.rates import Task as Task
from autoremat.planner.cost.rates import Work as Work
from autoremat.planner.cost.rates import curve_name as curve_name
from autoremat.planner.cost.roofline import SLOWEST as SLOWEST
from autoremat.planner.cost.roofline import datasheet_seconds as datasheet_seconds
from autoremat.planner.cost.roofline import is_plausible as is_plausible
from autoremat.planner.cost.roofline import roofline_seconds as roofline_seconds
from autoremat.planner.cost.roofline import saving_seconds_per_byte as saving_seconds_per_byte
from autoremat.planner.cost.sources import CostSource as CostSource
from autoremat.planner.cost.sources import Pricing as Pricing
