"""The checkpoint policies, for ``options={"policy": ...}``; see :mod:`autoremat.planner.constraints.policies`."""

from autoremat.planner.constraints.policies import Block as Block
from autoremat.planner.constraints.policies import Forward as Forward
from autoremat.planner.constraints.policies import Full as Full
from autoremat.planner.constraints.policies import Module as Module
from autoremat.planner.constraints.policies import Policy as Policy
from autoremat.planner.constraints.policies import Region as Region
from autoremat.planner.constraints.policies import Segments as Segments
from autoremat.planner.constraints.policies import Selective as Selective
from autoremat.planner.constraints.policies import Sqrt as Sqrt
from autoremat.planner.constraints.policies import Uniform as Uniform
from autoremat.planner.constraints.policies import parse as parse
