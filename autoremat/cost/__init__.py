"""Costs: from FLOPs and bytes to seconds."""

from autoremat.cost.basis import Basis as Basis
from autoremat.cost.basis import Pricing as Pricing
from autoremat.cost.devices import DATASHEETS as DATASHEETS
from autoremat.cost.devices import UNKNOWN_GPU as UNKNOWN_GPU
from autoremat.cost.devices import Device as Device
from autoremat.cost.devices import cpu_device as cpu_device
from autoremat.cost.devices import cuda_device as cuda_device
from autoremat.cost.devices import datasheet as datasheet
from autoremat.cost.devices import device_memory as device_memory
from autoremat.cost.rates import BATCH as BATCH
from autoremat.cost.rates import Curve as Curve
from autoremat.cost.rates import Rate as Rate
from autoremat.cost.rates import Rates as Rates
from autoremat.cost.rates import Task as Task
from autoremat.cost.rates import Work as Work
from autoremat.cost.rates import curve_name as curve_name
from autoremat.cost.roofline import SLOWEST as SLOWEST
from autoremat.cost.roofline import datasheet_seconds as datasheet_seconds
from autoremat.cost.roofline import is_plausible as is_plausible
from autoremat.cost.roofline import roofline_seconds as roofline_seconds
from autoremat.cost.roofline import saving_seconds_per_byte as saving_seconds_per_byte
