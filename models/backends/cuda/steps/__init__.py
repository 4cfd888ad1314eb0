"""What a step on a GPU needs besides the model: its inputs and outputs, the rows, sampling and recorded graphs."""
