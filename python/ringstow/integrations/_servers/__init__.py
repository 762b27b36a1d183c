"""What servers load: the weights of a model, out of any checkpoint that a trainer has left."""
