"""The report of one flow: `writing` draws everything, the others a file each."""
