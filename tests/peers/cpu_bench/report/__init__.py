"""What is made of the figures: times and goodput of a run, ratios with intervals, tables, and rows for the pages."""
