"""From a model's name to a replica. Imports ``fleet``'s client side and the floor."""
