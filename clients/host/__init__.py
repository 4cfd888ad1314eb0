"""The machine and the process: event loop, logs, sockets, files. Knows neither gRPC nor HTTP."""
