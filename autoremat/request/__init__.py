"""From the user's wish to what is asked of one graph: the options and the surroundings of a graph become its request."""
