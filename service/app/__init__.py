"""The composition of the server, and how it is started: by command, in process, with a gateway."""
