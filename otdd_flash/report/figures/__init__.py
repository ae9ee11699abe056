"""What pictures are made of: the page, its fonts, labels, brackets and frames."""
