"""openengine.v1, the contract between Dynamo's sidecar and engines: a translation to penstock.v1 and back."""
