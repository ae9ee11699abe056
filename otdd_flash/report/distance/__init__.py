"""The report of one distance: `writing` draws everything, the others a file or a table each."""
