"""The status page for operators: what a service does now, in a browser, with a list of live requests to cancel."""
