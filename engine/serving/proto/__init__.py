"""The protocol of the service, and what grpcio-tools makes of it."""
