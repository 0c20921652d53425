"""The tables of the papers, and the commands that reproduce them."""
