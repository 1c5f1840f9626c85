"""Model families: one file each, built from ``engine.layers``. Adding one takes a file and a reference test."""
