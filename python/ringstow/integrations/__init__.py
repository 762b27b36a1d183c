"""Training frameworks that save by ringstow.

Each module imports its framework. Nothing else in the package imports these modules.
"""
