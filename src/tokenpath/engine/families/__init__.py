"""Model families, one file each on shared layers; a new one takes a file and a reference test."""
