"""Objects in a state: what has `state_dict` and `load_state_dict`, such as modules and optimizers.

A save stores what their `state_dict` returns; a load hands them what it read. The objects stay
where they are in the caller's dict.
"""
