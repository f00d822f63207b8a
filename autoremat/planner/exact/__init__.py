"""The improvement of plans for autoremat.plan: the exact model, large-neighborhood search and annealing."""
