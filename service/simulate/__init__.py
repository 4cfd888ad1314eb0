"""``penstock simulate``: a load on a service that does not run, in virtual time."""
