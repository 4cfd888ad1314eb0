"""The machine and the process: event loop, logs, sockets, files. Independent of gRPC and HTTP."""
