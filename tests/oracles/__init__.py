"""Independent references that the tests compare the product with."""
