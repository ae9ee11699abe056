"""One pass over the scores of a single problem: softmins, plans applied, sums of plans."""
