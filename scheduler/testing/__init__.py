"""Stand-ins for workers, and the simulation. Not in the wheel."""
