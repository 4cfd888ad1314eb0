"""The gateway's calls to the service: streams, places, memory, the service's health."""
