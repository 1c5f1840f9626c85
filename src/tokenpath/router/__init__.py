"""From a model's name to the replica that answers. Imports ``fleet``'s client side and the floor."""
