"""Serving: one service, and the fronts that speak gRPC and HTTP to it."""
