"""From a joint FX graph to the planner's graph, with costs and source information."""
