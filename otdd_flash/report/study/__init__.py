"""The report of a study: csv files, pictures, one HTML page, and a table for the terminal."""
