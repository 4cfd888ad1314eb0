"""Steps on the device: their rows and recurrent states, their inputs and outputs, and their CUDA graphs."""
