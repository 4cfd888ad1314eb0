"""A fake executor, a fake worker and a simulation, for tests. Not in the wheel."""
