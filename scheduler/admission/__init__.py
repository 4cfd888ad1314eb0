"""Whether a request may enter: bounds, deadlines, predicted waiting time."""
