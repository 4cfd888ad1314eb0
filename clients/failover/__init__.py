"""Several targets: calls to the one that answers, and requests that continue at another one when theirs dies."""
