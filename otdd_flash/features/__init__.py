"""Features that stay in files: where their rows are, and the tensor that reads them as used."""
