"""The parts of a state: tensors, the tree of all other values, and objects with a state."""
