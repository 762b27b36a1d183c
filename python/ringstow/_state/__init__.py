"""What a state is made of: tensors, the tree of all other values, and objects with a state."""
