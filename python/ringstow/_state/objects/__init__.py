"""Objects in a state with `state_dict` and `load_state_dict`, such as modules and optimizers.

A save stores the result of `state_dict`; a load calls `load_state_dict`. The objects stay in place
in the caller's dict.
"""
