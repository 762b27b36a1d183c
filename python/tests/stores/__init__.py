"""Object stores for tests: two S3 servers, a client to look at them, a proxy that misbehaves.

``fixtures`` has what a test asks for; ``faults`` has what the proxy can do.
"""
